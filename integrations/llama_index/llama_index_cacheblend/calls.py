"""One call of the model with a prompt that holds chunks, in each of the four forms."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing, closing
from typing import Any

from llama_index.core.base.llms.types import ChatResponse, CompletionResponse

from cacheblend_rag.config import BlendConfig
from llama_index_cacheblend.context import ContextPrompt
from llama_index_cacheblend.llm import BlendLLM

__all__ = ["Caller", "ModelResponse", "aor_instead", "or_instead", "text_of"]

ModelResponse = ChatResponse | CompletionResponse


class Caller:
    """Sends prompts to a model, as messages if it is a chat model.

    Parameters
    ----------
    model : BlendLLM
        The model.
    config : BlendConfig, optional
        Blending settings, instead of the engine's.
    """

    def __init__(self, model: BlendLLM, config: BlendConfig | None) -> None:
        self._model = model
        self._config = config

    def call(self, prompt: ContextPrompt) -> ModelResponse:
        """Return the model's response."""
        response: ModelResponse
        if prompt.messages is None:
            response = self._model.complete(prompt.text, True, **self._options(prompt))
        else:
            response = self._model.chat(prompt.messages, **self._options(prompt))
        return response

    async def acall(self, prompt: ContextPrompt) -> ModelResponse:
        """Do what `call` does."""
        response: ModelResponse
        if prompt.messages is None:
            response = await self._model.acomplete(prompt.text, True, **self._options(prompt))
        else:
            response = await self._model.achat(prompt.messages, **self._options(prompt))
        return response

    def stream(self, prompt: ContextPrompt, end: Callable[[ModelResponse], None]) -> Generator[str, None, None]:
        """Return the pieces of the answer; `end` is called with the last response, before the generator ends.

        The model begins at once, and errors appear here and not when the first piece is read.
        """
        if prompt.messages is None:
            responses = self._model.stream_complete(prompt.text, True, **self._options(prompt))
        else:
            responses = self._model.stream_chat(prompt.messages, **self._options(prompt))

        def read() -> Generator[str, None, None]:
            for response in responses:
                if response.raw is not None:
                    end(response)
                if response.delta:
                    yield response.delta

        return read()

    async def astream(self, prompt: ContextPrompt, end: Callable[[ModelResponse], None]) -> AsyncGenerator[str, None]:
        """Do what `stream` does."""
        if prompt.messages is None:
            responses = await self._model.astream_complete(prompt.text, True, **self._options(prompt))
        else:
            responses = await self._model.astream_chat(prompt.messages, **self._options(prompt))

        async def read() -> AsyncGenerator[str, None]:
            async for response in responses:
                if response.raw is not None:
                    end(response)
                if response.delta:
                    yield response.delta

        return read()

    def _options(self, prompt: ContextPrompt) -> dict[str, Any]:
        options: dict[str, Any] = {"blend_prompt": prompt.blend}
        return options if self._config is None else options | {"blend_config": self._config}


def text_of(response: ModelResponse) -> str:
    """Return what the model wrote."""
    return (response.message.content or "") if isinstance(response, ChatResponse) else response.text


def or_instead(pieces: Generator[str, None, None], instead: str) -> Generator[str, None, None]:
    """Yield the pieces of an answer, or `instead` where the model wrote nothing."""
    with closing(pieces):
        first = next(pieces, None)
        yield instead if first is None else first
        yield from pieces


async def aor_instead(pieces: AsyncGenerator[str, None], instead: str) -> AsyncGenerator[str, None]:
    """Do what `or_instead` does."""
    async with aclosing(pieces):
        first = await anext(pieces, None)
        yield instead if first is None else first
        async for piece in pieces:
            yield piece
