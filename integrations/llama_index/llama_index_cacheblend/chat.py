"""Chat engines whose turns reuse what the turns before have computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.chat_engine.types import AgentChatResponse, StreamingAgentChatResponse
from llama_index.core.memory import BaseMemory, Memory
from llama_index.core.settings import Settings

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import Conversation
from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend.chat_turn import Turn, TurnSynthesizer
from llama_index_cacheblend.llm import BlendLLM
from llama_index_cacheblend.retriever import BlendRetriever

__all__ = ["BlendCondensePlusContextChatEngine", "BlendContextChatEngine"]


class _BlendChat:
    """What both chat engines have in common; the other base class is LlamaIndex's own engine.

    The prompts, the memory, the retrieval and the responses are LlamaIndex's. Only the synthesizer of each turn is ours, and
    what its response says is handed on.
    """

    def __init__(
        self, retriever: BaseRetriever, llm: Any, *args: Any, config: BlendConfig | None = None, **kwargs: Any
    ) -> None:
        model = _blend_llm(llm)
        self._config = _checked(model, config)
        self._conversation = model.engine.conversation()
        self._condensing = model.engine.conversation()
        self._talking = model.in_conversation(self._conversation)
        self._turns: ContextVar[Turn] = ContextVar("turn")
        if kwargs.get("node_postprocessors") and not isinstance(retriever, BlendRetriever):
            retriever = BlendRetriever(retriever, model)
        # What LlamaIndex asks the model besides the answer, for a condensed question, makes a conversation of its own.
        super().__init__(retriever, model.in_conversation(self._condensing), *args, **kwargs)  # type: ignore[call-arg]

    @classmethod
    def from_defaults(
        cls,
        retriever: BaseRetriever,
        chat_history: list[ChatMessage] | None = None,
        memory: BaseMemory | None = None,
        llm: Any = None,
        config: BlendConfig | None = None,
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
            Keeps what is said; by default LlamaIndex's `Memory`, which counts with the model's own tokenizer.
        llm : BlendLLM, optional
            The model; by default ``Settings.llm``.
        config : BlendConfig, optional
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
        model = _blend_llm(Settings.llm if llm is None else llm)
        if memory is None:
            window = model.metadata.context_window
            memory = Memory.from_defaults(
                chat_history=chat_history or [],
                token_limit=max(window - 256, window // 2),
                tokenizer_fn=model.engine.tokenizer.encode,
            )
        made = super().from_defaults(retriever, chat_history=chat_history, memory=memory, llm=model, **kwargs)  # type: ignore[misc]
        made._config = _checked(model, config)
        return made

    @property
    def conversation(self) -> Conversation:
        """The KV that is kept from turn to turn."""
        return self._conversation

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
        """Do what `chat` does; cancelling it ends the generation, and nothing of the turn is remembered."""
        with self._turning() as turn:
            return turn.complete(await super().achat(message, chat_history, **kwargs))  # type: ignore[misc, no-any-return]

    def stream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **kwargs: Any
    ) -> StreamingAgentChatResponse:
        """Answer a message piece by piece; ``metadata`` of the response is filled when the stream ends.

        The answer is written to the end, and to the memory, whether it is read or not. Where that fails, the message is taken
        back from the memory.
        """
        with self._turning() as turn:
            return turn.complete(super().stream_chat(message, chat_history, **kwargs))  # type: ignore[misc, no-any-return]

    async def astream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None, **kwargs: Any
    ) -> StreamingAgentChatResponse:
        """Do what `stream_chat` does; cancelling ``awrite_response_to_history_task`` of the response ends the generation."""
        with self._turning() as turn:
            return turn.complete(await super().astream_chat(message, chat_history, **kwargs))  # type: ignore[misc, no-any-return]

    def reset(self) -> None:
        """Forget what was said, and its KV."""
        super().reset()  # type: ignore[misc]
        self._conversation.reset()
        self._condensing.reset()

    @contextmanager
    def _turning(self) -> Iterator[Turn]:
        turn = Turn()
        token = self._turns.set(turn)
        try:
            yield turn
        finally:
            self._turns.reset(token)

    def _get_response_synthesizer(self, chat_history: list[ChatMessage], streaming: bool = False) -> TurnSynthesizer:
        own = super()._get_response_synthesizer(chat_history, streaming)  # type: ignore[misc]
        return TurnSynthesizer(
            self._turns.get(),
            self._memory,  # type: ignore[attr-defined]
            llm=self._talking,
            text_qa_template=own._text_qa_template,
            refine_template=own._refine_template,
            config=self._config,
            streaming=streaming,
            callback_manager=self.callback_manager,  # type: ignore[attr-defined]
        )


class BlendContextChatEngine(_BlendChat, ContextChatEngine):
    """LlamaIndex's `ContextChatEngine`, whose context is blended and whose turns reuse what was computed before.

    Each message retrieves a context, which stands in the system message before the history. Tokens that stand where they stood
    in the turn before are not computed again; history that stands elsewhere now is blended like a chunk. `Conversation` says how
    exact that is. One engine is one chat: ask one message at a time.

    Parameters
    ----------
    retriever : BaseRetriever
        Finds the context; where there are postprocessors, what it finds is fetched from slower tiers while they work.
    llm : BlendLLM
        The model.
    *args, **kwargs : Any
        As for `ContextChatEngine`.
    config : BlendConfig, optional
        Blending settings of this chat, instead of the engine's.

    Raises
    ------
    ConfigError
        If the language model cannot blend.
    """


class BlendCondensePlusContextChatEngine(_BlendChat, CondensePlusContextChatEngine):
    """LlamaIndex's `CondensePlusContextChatEngine`, whose context is blended and whose turns reuse what was computed before.

    As `BlendContextChatEngine`, but a message is first made a question of its own, by the model and the history, and that
    question retrieves. Parameters and errors are the same, `CondensePlusContextChatEngine` in the place of `ContextChatEngine`.
    """


def _checked(model: BlendLLM, config: BlendConfig | None) -> BlendConfig | None:
    """Return settings, of which a wrong one is said now and not by the first message."""
    if config is not None:
        model.engine.check_config(config)
    return config


def _blend_llm(llm: Any) -> BlendLLM:
    if not isinstance(llm, BlendLLM):
        raise ConfigError(
            f"blending needs a BlendLLM, and the chat's language model is a {type(llm).__name__}; pass "
            'llm=BlendLLM(model="reference"), or set Settings.llm to one'
        )
    return llm
