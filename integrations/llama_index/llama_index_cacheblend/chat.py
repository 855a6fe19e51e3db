"""Chat engines whose contexts are blended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from llama_index.core.async_utils import asyncio_run
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.chat_engine.types import AgentChatResponse, StreamingAgentChatResponse
from llama_index.core.memory import BaseMemory, Memory
from llama_index.core.storage.chat_store.base_db import MessageStatus

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import CacheBlendError
from llama_index_cacheblend.context import Rounds
from llama_index_cacheblend.llm import blend_llm
from llama_index_cacheblend.retriever import BlendRetriever
from llama_index_cacheblend.synthesizer import BlendSynthesizer

__all__ = ["BlendCondensePlusContextChatEngine", "BlendContextChatEngine", "take_back"]

R = TypeVar("R", AgentChatResponse, StreamingAgentChatResponse)


@dataclass
class _Turn:
    """One turn of a chat: its synthesizer's response, once it is there."""

    answered: RESPONSE_TYPE | None = None

    def complete(self, response: R) -> R:
        """Give the chat engine's response the metadata and source nodes of the synthesizer's."""
        if self.answered is not None:
            response.metadata = self.answered.metadata  # type: ignore[attr-defined]
            response.source_nodes = self.answered.source_nodes
        if isinstance(response, StreamingAgentChatResponse):
            _end_when_cancelled(response)
        return response


class _TurnSynthesizer(BlendSynthesizer):
    """Answers one turn, and keeps the memory, into which LlamaIndex puts the message before a streamed answer begins, free of
    messages without an answer.
    """

    # A chat engine makes the template of each turn of what was said before.
    _keeps_head = False

    def __init__(self, turn: _Turn, memory: BaseMemory, **options: Any) -> None:
        super().__init__(**options)
        self._turn = turn
        self._memory = memory

    def _finished(self, response: RESPONSE_TYPE, asked: dict[str, Any]) -> RESPONSE_TYPE:
        self._turn.answered = super()._finished(response, asked)
        return response

    def _pieces(self, rounds: Rounds, *args: Any) -> Generator[str, None, None]:
        try:
            yield from super()._pieces(rounds, *args)
        except BaseException:
            take_back(self._memory, rounds.query_str)
            raise

    async def _apieces(self, rounds: Rounds, *args: Any) -> AsyncGenerator[str, None]:
        try:
            async with aclosing(super()._apieces(rounds, *args)) as pieces:
                async for piece in pieces:
                    yield piece
        except BaseException:
            await _atake_back(self._memory, rounds.query_str)
            raise


class _BlendChat:
    """Base of both chat engines; the other base class is LlamaIndex's own engine.

    The prompts, the memory, the retrieval and the responses are LlamaIndex's. Only the synthesizer of each turn is ours, and
    what its response says is handed on.
    """

    def __init__(
        self, retriever: BaseRetriever, llm: Any, *args: Any, blend_config: BlendConfig | None = None, **kwargs: Any
    ) -> None:
        model = blend_llm(llm)
        if blend_config is not None:
            # A wrong setting is said now and not by the first message.
            model.engine.check_blend(blend_config)
        self._blend_config = blend_config
        self._turns: ContextVar[_Turn] = ContextVar("turn")
        if kwargs.get("node_postprocessors") and not isinstance(retriever, BlendRetriever):
            retriever = BlendRetriever(retriever, model)
        super().__init__(retriever, model, *args, **kwargs)  # type: ignore[call-arg]

    @classmethod
    def from_defaults(
        cls,
        retriever: BaseRetriever,
        chat_history: list[ChatMessage] | None = None,
        memory: BaseMemory | None = None,
        llm: Any = None,
        blend_config: BlendConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make a chat engine.

        Parameters
        ----------
        retriever : BaseRetriever
            Finds the context.
        chat_history : list of ChatMessage, optional
            What was said before.
        memory : BaseMemory, optional
            Keeps the conversation; by default LlamaIndex's `Memory`, which counts with the model's own tokenizer.
        llm : BlendLLM, optional
            The model; by default ``Settings.llm``.
        blend_config : BlendConfig, optional
            Blending settings of this chat, instead of the engine's.
        **kwargs : Any
            As for LlamaIndex's own chat engine: `system_prompt`, `node_postprocessors`, templates and so on.

        Returns
        -------
        BlendContextChatEngine or BlendCondensePlusContextChatEngine
            The chat engine.

        Raises
        ------
        ConfigError
            If the language model cannot blend.
        """
        model = blend_llm(llm)
        if blend_config is not None:
            model.engine.check_blend(blend_config)
        if memory is None:
            window = model.metadata.context_window
            memory = Memory.from_defaults(
                chat_history=chat_history or [],
                token_limit=max(window - 256, window // 2),
                tokenizer_fn=model.engine.tokenizer.encode,
            )
        made = super().from_defaults(retriever, chat_history=chat_history, memory=memory, llm=model, **kwargs)  # type: ignore[misc]
        made._blend_config = blend_config
        return made

    def chat(self, message: str, chat_history: list[ChatMessage] | None = None, **kwargs: Any) -> AgentChatResponse:
        """Answer a message.

        Parameters
        ----------
        message : str
            The message.
        chat_history : list of ChatMessage, optional
            What was said before, instead of what the memory holds.
        **kwargs : Any
            As for LlamaIndex's own chat engine.

        Returns
        -------
        AgentChatResponse
            The answer; ``metadata["blend"]`` is the report of the turn.
        """
        with self._turning() as turn:
            return turn.complete(super().chat(message, chat_history, **kwargs))  # type: ignore[misc, no-any-return]

    async def achat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **kwargs: Any
    ) -> AgentChatResponse:
        """Answer asynchronously; see `chat`. Cancelling ends the generation, and nothing of the turn is remembered."""
        with self._turning() as turn:
            return turn.complete(await super().achat(message, chat_history, **kwargs))  # type: ignore[misc, no-any-return]

    def stream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **kwargs: Any
    ) -> StreamingAgentChatResponse:
        """Answer a message piece by piece; ``metadata`` of the response is filled when the stream ends.

        The answer is written to the end, and to the memory, whether it is read or not. If that fails, the message is removed
        from the memory.
        """
        with self._turning() as turn:
            return turn.complete(super().stream_chat(message, chat_history, **kwargs))  # type: ignore[misc, no-any-return]

    async def astream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **kwargs: Any
    ) -> StreamingAgentChatResponse:
        """Stream an answer asynchronously; cancelling the response's ``awrite_response_to_history_task`` ends the generation."""
        with self._turning() as turn:
            return turn.complete(await super().astream_chat(message, chat_history, **kwargs))  # type: ignore[misc, no-any-return]

    @contextmanager
    def _turning(self) -> Iterator[_Turn]:
        turn = _Turn()
        token = self._turns.set(turn)
        try:
            yield turn
        finally:
            self._turns.reset(token)

    def _get_response_synthesizer(self, chat_history: list[ChatMessage], streaming: bool = False) -> _TurnSynthesizer:
        own = super()._get_response_synthesizer(chat_history, streaming)  # type: ignore[misc]
        return _TurnSynthesizer(
            self._turns.get(),
            self._memory,  # type: ignore[attr-defined]
            llm=self._llm,  # type: ignore[attr-defined]
            text_qa_template=own._text_qa_template,
            refine_template=own._refine_template,
            blend_config=self._blend_config,
            streaming=streaming,
            callback_manager=self.callback_manager,  # type: ignore[attr-defined]
        )


class BlendContextChatEngine(_BlendChat, ContextChatEngine):  # type: ignore[misc]
    """LlamaIndex's `ContextChatEngine` with a blended context.

    Each message retrieves a context, which goes into the system message before the history. While it is the same, a turn computes
    only what is new; history behind another context is computed again. One engine is one chat: send one message at a time.

    Parameters
    ----------
    retriever : BaseRetriever
        Finds the context; if there are postprocessors, its KV is fetched from slower tiers while they work.
    llm : BlendLLM
        The model.
    *args, **kwargs : Any
        As for `ContextChatEngine`.
    blend_config : BlendConfig, optional
        Blending settings of this chat, instead of the engine's.

    Raises
    ------
    ConfigError
        If the language model cannot blend.
    """


class BlendCondensePlusContextChatEngine(_BlendChat, CondensePlusContextChatEngine):  # type: ignore[misc]
    """LlamaIndex's `CondensePlusContextChatEngine` with a blended context.

    Like `BlendContextChatEngine`, but the model first rewrites each message, with the history, as a standalone question, which is
    used to retrieve. Parameters and errors are the same, with `CondensePlusContextChatEngine` in place of `ContextChatEngine`.
    """


def _end_when_cancelled(response: StreamingAgentChatResponse) -> None:
    """Tell who reads a response that the task which writes it was cancelled; LlamaIndex would let them wait for ever."""

    def ended(task: asyncio.Task[None]) -> None:
        if task.cancelled():
            response.exception = CacheBlendError(
                "the task that wrote this answer was cancelled, so the answer is incomplete; try again"
            )
            response.aput_in_queue("")

    if response.awrite_response_to_history_task is not None:
        response.awrite_response_to_history_task.add_done_callback(ended)


def take_back(memory: BaseMemory, message: str) -> None:
    """Remove the last message of a memory if it is this one of the user; what `Memory` has archived stays archived."""
    if isinstance(memory, Memory):
        asyncio_run(_remove_last(memory, message))
        return
    history = memory.get_all()
    if _ends_with(history, message):
        memory.set(history[:-1])


async def _atake_back(memory: BaseMemory, message: str) -> None:
    """Take back a message asynchronously; see `take_back`."""
    if isinstance(memory, Memory):
        await _remove_last(memory, message)
        return
    history = await memory.aget_all()
    if _ends_with(history, message):
        await memory.aset(history[:-1])


async def _remove_last(memory: Memory, message: str) -> None:
    # `Memory.set` would make active again what was archived for want of room, and the store removes no newest message.
    active = await memory.aget_all(MessageStatus.ACTIVE)
    if not _ends_with(active, message):
        return
    await memory.areset(MessageStatus.ACTIVE)
    if active[:-1]:
        await memory.sql_store.add_messages(memory.session_id, active[:-1], status=MessageStatus.ACTIVE)


def _ends_with(history: Sequence[ChatMessage], message: str) -> bool:
    return bool(history) and history[-1].role == MessageRole.USER and history[-1].content == message
