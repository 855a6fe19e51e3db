"""Chat engines whose contexts are blended."""

from __future__ import annotations

from typing import Any, TypeVar

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.chat_engine.types import AgentChatResponse, StreamingAgentChatResponse
from llama_index.core.memory import BaseMemory, Memory

from cacheblend_rag.config import BlendConfig
from llama_index_cacheblend.llm import blend_llm
from llama_index_cacheblend.retriever import BlendRetriever
from llama_index_cacheblend.synthesizer import BlendSynthesizer

__all__ = ["BlendCondensePlusContextChatEngine", "BlendContextChatEngine"]

R = TypeVar("R", AgentChatResponse, StreamingAgentChatResponse)


class _TurnSynthesizer(BlendSynthesizer):
    """Answers one turn of a chat, and keeps its response, of which chat engines hand on the text only."""

    # A chat engine makes the template of each turn of what was said before.
    _keeps_head = False
    answered: RESPONSE_TYPE

    def _finished(self, response: RESPONSE_TYPE, asked: dict[str, Any]) -> RESPONSE_TYPE:
        self.answered = super()._finished(response, asked)
        return self.answered


class _BlendChat:
    """Base of both chat engines beside LlamaIndex's own: the synthesizer of each turn, and what its response says, are ours."""

    _turn: _TurnSynthesizer

    def __init__(
        self, retriever: BaseRetriever, llm: Any, *args: Any, blend_config: BlendConfig | None = None, **kwargs: Any
    ) -> None:
        model = blend_llm(llm, blend_config)
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
        """Make a chat engine; `ConfigError` if the language model cannot blend.

        Parameters
        ----------
        retriever, chat_history, **kwargs
            As for LlamaIndex's own chat engine: `system_prompt`, `node_postprocessors`, templates and so on.
        memory : BaseMemory, optional
            Keeps the conversation; by default LlamaIndex's `Memory`, which counts with the model's own tokenizer.
        llm : BlendLLM, optional
            The model; by default ``Settings.llm``.
        blend_config : BlendConfig, optional
            Blending settings of this chat, instead of the engine's.
        """
        model = blend_llm(llm, blend_config)
        if memory is None:
            window = model.metadata.context_window
            memory = Memory.from_defaults(
                chat_history=chat_history or [],
                token_limit=max(window - 256, window // 2),
                tokenizer_fn=model.engine.tokenizer.encode,
            )
        return super().from_defaults(retriever, chat_history=chat_history, memory=memory, llm=model, **kwargs)  # type: ignore[misc]

    def chat(self, message: str, chat_history: list[ChatMessage] | None = None, **kwargs: Any) -> AgentChatResponse:
        """Answer a message; ``metadata["blend"]`` of the response is the report of the turn."""
        return self._told(super().chat(message, chat_history, **kwargs))  # type: ignore[misc, no-any-return]

    async def achat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **kwargs: Any
    ) -> AgentChatResponse:
        """Answer asynchronously; see `chat`. Cancelling ends the generation, and nothing of the turn is remembered."""
        return self._told(await super().achat(message, chat_history, **kwargs))  # type: ignore[misc, no-any-return]

    def stream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **kwargs: Any
    ) -> StreamingAgentChatResponse:
        """Answer piece by piece, to the end whether it is read or not; ``metadata`` of the response is filled then."""
        return self._told(super().stream_chat(message, chat_history, **kwargs))  # type: ignore[misc, no-any-return]

    async def astream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **kwargs: Any
    ) -> StreamingAgentChatResponse:
        """Stream an answer asynchronously; cancelling the response's ``awrite_response_to_history_task`` ends the generation."""
        return self._told(await super().astream_chat(message, chat_history, **kwargs))  # type: ignore[misc, no-any-return]

    def _told(self, response: R) -> R:
        """Give the chat engine's response the metadata and source nodes of the synthesizer's."""
        response.metadata = self._turn.answered.metadata  # type: ignore[attr-defined]
        response.source_nodes = self._turn.answered.source_nodes
        return response

    def _get_response_synthesizer(self, chat_history: list[ChatMessage], streaming: bool = False) -> _TurnSynthesizer:
        own = super()._get_response_synthesizer(chat_history, streaming)  # type: ignore[misc]
        self._turn = _TurnSynthesizer(
            llm=self._llm,  # type: ignore[attr-defined]
            text_qa_template=own._text_qa_template,
            refine_template=own._refine_template,
            streaming=streaming,
            callback_manager=self.callback_manager,  # type: ignore[attr-defined]
        )
        return self._turn


class BlendContextChatEngine(_BlendChat, ContextChatEngine):  # type: ignore[misc]
    """LlamaIndex's `ContextChatEngine` with a blended context.

    Each message retrieves a context, which goes into the system message before the history. While it is the same, a turn computes
    only what is new; history behind another context is computed again. One engine is one chat: send one message at a time.

    Parameters are those of `ContextChatEngine`, and `blend_config`, blending settings of this chat instead of the engine's. If
    there are postprocessors, the KV of what was retrieved is fetched from slower tiers while they work.
    """


class BlendCondensePlusContextChatEngine(_BlendChat, CondensePlusContextChatEngine):  # type: ignore[misc]
    """LlamaIndex's `CondensePlusContextChatEngine` with a blended context.

    Like `BlendContextChatEngine`, but the model first rewrites each message, with the history, as a standalone question, which is
    used to retrieve. Parameters and errors are the same, with `CondensePlusContextChatEngine` in place of `ContextChatEngine`.
    """
