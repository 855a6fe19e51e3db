"""The chat model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from cacheblend_rag import BlendPrompt, Chunk
from cacheblend_rag.chunk import Segment
from cacheblend_rag.errors import PromptError
from langchain_cacheblend.messages import render_chat
from langchain_cacheblend.model import Answer, BlendModel
from langchain_cacheblend.pml import prompt_in

__all__ = ["ChatBlend"]


class ChatBlend(BlendModel, BaseChatModel):
    """A chat model for LangChain that blends the stored chunks it finds in a conversation.

    ::

        llm = ChatBlend(model="reference")
        store = BlendVectorStore(Chroma(embedding_function=...), engine=llm.engine)
        chain = prompt | llm

    The conversation is rendered by the model's own chat template. Documents in a message's content, blocks of type "text-plain"
    as `documents_to_blocks` makes them, are chunks as they are. What a call cost stands in the answer's
    ``response_metadata["blend"]``, and how many tokens' KV was reused in its ``usage_metadata``. The parameters are those of
    `BlendModel`.
    """

    def blend_prompt(self, input: LanguageModelInput) -> BlendPrompt:
        """Return the prompt that the engine is given for `input`, with the stored chunks that were found in it."""
        messages = self._convert_input(input).to_messages()
        prompt = prompt_in(messages)
        if prompt is not None:
            return self.engine.schemas.blend_prompt(prompt)
        segments: list[Segment] = []
        for part in render_chat(self.engine.tokenizer, messages):
            segments += [part] if isinstance(part, Chunk) else self._split(part)
        return BlendPrompt(segments=segments)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Return how many tokens the model is given for a conversation, template included."""
        if tools:
            raise PromptError("ChatBlend passes no tools on to its model; leave them out")
        return len(self.engine.prompt_ids(self.blend_prompt(messages)))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._result(self._answer(self._call(self.blend_prompt(messages), stop, kwargs)))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._result(await self._aanswer(lambda: self._call(self.blend_prompt(messages), stop, kwargs)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for piece in self._pieces(self._call(self.blend_prompt(messages), stop, kwargs)):
            if isinstance(piece, str):
                message = AIMessageChunk(content=piece)
            else:
                message = AIMessageChunk(
                    content="",
                    usage_metadata=piece.usage(),
                    response_metadata=self._metadata(piece),
                    chunk_position="last",
                )
            chunk = ChatGenerationChunk(message=message)
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def _result(self, answer: Answer) -> ChatResult:
        message = AIMessage(
            content=answer.text, usage_metadata=answer.usage(), response_metadata=self._metadata(answer)
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _metadata(self, answer: Answer) -> dict[str, Any]:
        return {"model_name": self.model, "model_provider": "cacheblend"} | answer.info()
