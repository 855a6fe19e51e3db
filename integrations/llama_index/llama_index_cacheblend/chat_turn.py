"""One turn of a chat: its synthesizer, and what is known of it at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any, TypeVar

from llama_index.core.base.response.schema import RESPONSE_TYPE, AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine.types import AgentChatResponse, StreamingAgentChatResponse
from llama_index.core.memory import BaseMemory
from llama_index.core.schema import NodeWithScore, QueryType

from cacheblend_rag.errors import CacheBlendError
from llama_index_cacheblend.chat_memory import atake_back, take_back
from llama_index_cacheblend.synthesizer import BlendSynthesizer

__all__ = ["Turn", "TurnSynthesizer"]

R = TypeVar("R", AgentChatResponse, StreamingAgentChatResponse)


class Turn:
    """What a turn's synthesizer has answered, for the chat engine's response.

    Attributes
    ----------
    answered : Response or None
        The synthesizer's response, once it is there.
    """

    def __init__(self) -> None:
        self.answered: RESPONSE_TYPE | None = None

    def complete(self, response: R) -> R:
        """Give a chat engine's response the metadata and source nodes of the synthesizer's.

        Parameters
        ----------
        response : AgentChatResponse or StreamingAgentChatResponse
            The response; `metadata` of a streaming one is new.

        Returns
        -------
        AgentChatResponse or StreamingAgentChatResponse
            The same response.
        """
        if self.answered is not None:
            response.metadata = self.answered.metadata  # type: ignore[union-attr]
            response.source_nodes = self.answered.source_nodes
        if isinstance(response, StreamingAgentChatResponse):
            _end_when_cancelled(response)
        return response


class TurnSynthesizer(BlendSynthesizer):
    """Answers one turn, and keeps the memory free of messages without an answer.

    Parameters
    ----------
    turn : Turn
        Told the response.
    memory : BaseMemory
        The chat's memory, into which LlamaIndex puts the message before a streamed answer begins.
    **options : Any
        As for `BlendSynthesizer`.
    """

    # A chat engine makes the template of each turn of what was said before.
    _keeps_head = False

    def __init__(self, turn: Turn, memory: BaseMemory, **options: Any) -> None:
        super().__init__(**options)
        self._turn = turn
        self._memory = memory

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer a message from nodes."""
        response = super().synthesize(query, nodes, additional_source_nodes, **response_kwargs)
        if isinstance(response, StreamingResponse):
            response.response_gen = self._guarded(response.response_gen, str(query))
        self._turn.answered = response
        return response

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Do what `synthesize` does."""
        response = await super().asynthesize(query, nodes, additional_source_nodes, **response_kwargs)
        if isinstance(response, AsyncStreamingResponse):
            response.response_gen = self._aguarded(response.response_gen, str(query))
        self._turn.answered = response
        return response

    def _guarded(self, pieces: Generator[str, None, None], message: str) -> Generator[str, None, None]:
        try:
            yield from pieces
        except BaseException:
            take_back(self._memory, message)
            raise

    async def _aguarded(self, pieces: AsyncGenerator[str, None], message: str) -> AsyncGenerator[str, None]:
        try:
            async for piece in pieces:
                yield piece
        except BaseException:
            await pieces.aclose()
            await atake_back(self._memory, message)
            raise


def _end_when_cancelled(response: StreamingAgentChatResponse) -> None:
    """Tell who reads a response that the task which writes it was cancelled; LlamaIndex would let them wait for ever."""

    def ended(task: asyncio.Task[None]) -> None:
        if task.cancelled():
            response.exception = CacheBlendError(
                "the task that wrote this answer was cancelled, so the answer is not whole; ask again"
            )
            response.aput_in_queue("")

    if response.awrite_response_to_history_task is not None:
        response.awrite_response_to_history_task.add_done_callback(ended)
