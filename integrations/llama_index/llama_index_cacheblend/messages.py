"""Conversion of chat messages to the prompt that a tokenizer's chat template makes, and of answers to LlamaIndex's responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CitableBlock,
    CitationBlock,
    CompletionResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from cacheblend_rag.chat.render import apply_template, past_call
from cacheblend_rag.engine import BlendStream, GenerationResult
from cacheblend_rag.errors import PromptError
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.report import CallReport
from cacheblend_rag.stops import acut_pieces, cut_pieces

__all__ = ["Make", "R", "aresponses", "as_chat", "as_completion", "render_messages", "responses", "said_messages"]

# What is no part of what was said: the model's own thoughts, marks for other models' caches, and what an answer referred to.
_SILENT = (CachePoint, CitationBlock, ThinkingBlock)

R = TypeVar("R", ChatResponse, CompletionResponse)
Make = Callable[[str, str | None, GenerationResult | None], R]
"""Makes a response of the text so far, the piece that was added last, and the result once the answer is whole."""


def render_messages(tokenizer: Any, messages: Sequence[ChatMessage]) -> str:
    """Write chat messages as one prompt, up to where the assistant's answer begins, with the BOS if the template writes one.

    All that is said and called stands in it (`apply_template`). `PromptError` if a message holds something other than text and
    calls of tools, or the template shows it nowhere.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        role, more = message.role.value, message.additional_kwargs
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        for block in message.blocks:
            if isinstance(block, CitableBlock) and block.title:
                texts.append(block.title)
            for part in block.content if isinstance(block, CitableBlock) else [block]:
                if isinstance(part, TextBlock):
                    texts.append(part.text)
                elif isinstance(part, ToolCallBlock):
                    calls.append(past_call(part.tool_name, part.tool_kwargs, part.tool_call_id))
                elif not isinstance(part, _SILENT):
                    raise PromptError(
                        f"a {role} message holds a {type(part).__name__}, and BlendLLM reads text only; leave it out"
                    )
        calls = calls or [_call(each) for each in more.get("tool_calls") or ()]
        turn: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        turn |= {name: more[name] for name in ("name", "tool_call_id") if isinstance(more.get(name), str)}
        turns.append(turn | ({"tool_calls": calls} if calls else {}))
    try:
        return apply_template(tokenizer, turns)
    except PromptError as error:
        raise PromptError(f"{error}; or give BlendLLM a messages_to_prompt of your own") from error


def _call(given: Any) -> dict[str, Any]:
    """Return a past call as LlamaIndex's classes for OpenAI and Anthropic keep it beside a message."""
    call = given if isinstance(given, dict) else dict(given)
    function = call.get("function", call)
    function = function if isinstance(function, dict) else dict(function)
    if not isinstance(function.get("name"), str):
        raise PromptError(f"a message has the tool call {given!r:.80}, which has no name; leave it out")
    return past_call(function["name"], function.get("arguments", function.get("input")), call.get("id"))


def said_messages(
    tokenizer: Any, write: Callable[[Sequence[ChatMessage]], str], messages: Sequence[ChatMessage]
) -> str:
    """Write messages by a function of the user's, which alone may write control tokens."""
    said = lexer_of(tokenizer).said
    marked = [
        each.model_copy(
            update={
                "blocks": [
                    block.model_copy(update={"text": said(block.text)}) if isinstance(block, TextBlock) else block
                    for block in each.blocks
                ]
            }
        )
        for each in messages
    ]
    return write(marked)


def as_completion(text: str, delta: str | None, result: GenerationResult | None) -> CompletionResponse:
    """Return `text` as a completion; `result` is known when the answer is whole."""
    return CompletionResponse(text=text, delta=delta, raw=result and _raw(result))


def as_chat(text: str, delta: str | None, result: GenerationResult | None) -> ChatResponse:
    """Return `text` as an assistant's message; `result` is known when the answer is whole."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, delta=delta, raw=result and _raw(result))


def _raw(result: GenerationResult) -> dict[str, Any]:
    """Return what LlamaIndex keeps as the raw response: token usage, the generated ids, and the blend report."""
    report = result.report
    usage = {"prompt_tokens": report.prompt_tokens, "completion_tokens": report.output_tokens}
    usage["total_tokens"] = report.prompt_tokens + report.output_tokens
    return {"usage": usage, "token_ids": list(result.token_ids), "blend": CallReport.of(report)}


def responses(stream: BlendStream, stops: Sequence[str], make: Make[R]) -> Generator[R, None, None]:
    """Yield a response for each piece of a stream up to the first stop string, and an empty one with the raw response at its end.

    Closing the generator ends the generation.
    """
    text = ""
    try:
        for piece in cut_pieces(stream, stops):
            text += piece
            yield make(text, piece, None)
    finally:
        stream.close()
    yield make(text, "", stream.result())


async def aresponses(stream: BlendStream, stops: Sequence[str], make: Make[R]) -> AsyncGenerator[R, None]:
    """Yield responses asynchronously; see `responses`. The generation ends soon after reading stops."""
    text = ""
    try:
        async with aclosing(acut_pieces(stream, stops)) as pieces:
            async for piece in pieces:
                text += piece
                yield make(text, piece, None)
    finally:
        stream.close()
    yield make(text, "", await stream.aresult())
