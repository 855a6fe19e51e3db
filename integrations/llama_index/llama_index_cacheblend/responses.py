"""The engine's answers as LlamaIndex's response objects."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole

from cacheblend_rag.engine import BlendStream, GenerationResult
from llama_index_cacheblend.decoding import aread_stream, read_stream

__all__ = ["aresponses", "as_chat", "as_completion", "raw_response", "responses"]

R = TypeVar("R", ChatResponse, CompletionResponse)


def raw_response(result: GenerationResult) -> dict[str, Any]:
    """Return what LlamaIndex keeps as the raw response: token usage, the generated ids, and the blend report."""
    report = result.report
    return {
        "usage": {
            "prompt_tokens": report.prompt_tokens,
            "completion_tokens": report.output_tokens,
            "total_tokens": report.prompt_tokens + report.output_tokens,
        },
        "token_ids": list(result.token_ids),
        "blend": report.to_dict(),
    }


def as_completion(text: str, delta: str | None, result: GenerationResult | None) -> CompletionResponse:
    """Return `text` as a completion; `result` is known when the answer is whole."""
    return CompletionResponse(text=text, delta=delta, raw=result and raw_response(result))


def as_chat(text: str, delta: str | None, result: GenerationResult | None) -> ChatResponse:
    """Return `text` as an assistant's message; `result` is known when the answer is whole."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, delta=delta, raw=result and raw_response(result))


def responses(
    stream: BlendStream, stops: Sequence[str], make: Callable[[str, str | None, GenerationResult | None], R]
) -> Generator[R, None, None]:
    """Yield a response for each piece of a stream, and an empty one with the raw response at its end.

    Parameters
    ----------
    stream : BlendStream
        The stream.
    stops : sequence of str
        Where the answer ends.
    make : callable
        `as_completion` or `as_chat`.

    Yields
    ------
    CompletionResponse or ChatResponse
        The text so far and the piece that was added to it.
    """
    text = ""
    for piece in read_stream(stream, stops):
        text += piece
        yield make(text, piece, None)
    yield make(text, "", stream.result())


async def aresponses(
    stream: BlendStream, stops: Sequence[str], make: Callable[[str, str | None, GenerationResult | None], R]
) -> AsyncGenerator[R, None]:
    """Do what `responses` does, on an event loop: the generation ends soon when nobody reads any more."""
    text = ""
    async with aclosing(aread_stream(stream, stops)) as pieces:
        async for piece in pieces:
            text += piece
            yield make(text, piece, None)
    yield make(text, "", await stream.aresult())
