"""Conversion of chat messages to the prompt that a tokenizer's chat template makes, and of answers to LlamaIndex's responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, replace
from types import MappingProxyType
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

from cacheblend_rag.chat.answer import Answer, Ending
from cacheblend_rag.chat.render import apply_template, past_call, template_variables
from cacheblend_rag.engine import BlendStream
from cacheblend_rag.errors import PromptError
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.report import CallReport
from cacheblend_rag.stops import Thought

__all__ = [
    "aresponses",
    "as_chat",
    "as_completion",
    "render_messages",
    "responses",
    "said_at_once",
    "said_messages",
]

# What is no part of what was said: marks for other models' caches, and what an answer referred to.
_SILENT = (CachePoint, CitationBlock)

R = TypeVar("R", ChatResponse, CompletionResponse)


@dataclass(frozen=True, slots=True)
class Said:
    """An answer as far as it has been said: its text, what was thought before it, and what of both was added last."""

    text: str = ""
    thoughts: str = ""
    delta: str | None = None
    thought: str | None = None
    # All of it, once it is whole, and the tokens of the thoughts of a model that thinks.
    answer: Answer | None = None
    reasoning_tokens: int | None = None

    def more(self, piece: str | Answer, ending: Ending) -> Said:
        """Return it with a further piece; at the end nothing is added."""
        if isinstance(piece, Answer):
            return replace(said_at_once(piece, ending), delta="")
        if isinstance(piece, Thought):
            return Said(self.text, self.thoughts + piece, "", str(piece))
        return Said(self.text + piece, self.thoughts, piece)


def render_messages(
    tokenizer: Any,
    messages: Sequence[ChatMessage],
    own: Mapping[str, Any] = MappingProxyType({}),
    asked: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Write chat messages as one prompt, up to where the assistant's answer begins, with the BOS if the template writes one.

    All that is said and called stands in it (`apply_template`); what was thought does where the template shows it. `own` and
    `asked` set variables of the template. `PromptError` if a message holds something other than text, thoughts and calls of
    tools, or the template shows it nowhere.
    """
    variables = template_variables(tokenizer, own, asked) if own or asked else {}
    turns: list[dict[str, Any]] = []
    for message in messages:
        role, more = message.role.value, message.additional_kwargs
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for block in message.blocks:
            if isinstance(block, CitableBlock) and block.title:
                texts.append(block.title)
            for part in block.content if isinstance(block, CitableBlock) else [block]:
                if isinstance(part, TextBlock):
                    texts.append(part.text)
                elif isinstance(part, ToolCallBlock):
                    calls.append(past_call(part.tool_name, part.tool_kwargs, part.tool_call_id))
                elif isinstance(part, ThinkingBlock):
                    thoughts.append(part.content or "")
                elif not isinstance(part, _SILENT):
                    raise PromptError(
                        f"a {role} message holds a {type(part).__name__}, and BlendLLM reads text only; leave it out"
                    )
        if more.get("tool_calls") and not calls:
            raise PromptError(
                f"a {role} message has tool_calls in its additional_kwargs, which another model's class has put there; give them "
                "as blocks, ToolCallBlock"
            )
        turn: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        turn |= {name: more[name] for name in ("name", "tool_call_id") if isinstance(more.get(name), str)}
        turn |= {"reasoning_content": "\n\n".join(thoughts)} if any(thoughts) else {}
        turns.append(turn | ({"tool_calls": calls} if calls else {}))
    try:
        return apply_template(tokenizer, turns, **variables)
    except PromptError as error:
        raise PromptError(f"{error}; or give BlendLLM a messages_to_prompt of your own") from error


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


def as_completion(said: Said) -> CompletionResponse:
    """Return an answer as a completion."""
    return CompletionResponse(text=said.text, delta=said.delta, raw=_raw(said))


def as_chat(said: Said) -> ChatResponse:
    """Return an answer as an assistant's message, thoughts as a block before the text."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=said.text)
    if said.thoughts:
        message.blocks.insert(0, ThinkingBlock(content=said.thoughts, num_tokens=said.reasoning_tokens))
    thought = {} if said.thought is None else {"thinking_delta": said.thought}
    return ChatResponse(message=message, delta=said.delta, raw=_raw(said), additional_kwargs=thought)


def _raw(said: Said) -> dict[str, Any] | None:
    """Return what LlamaIndex keeps as the raw response: token usage, the generated ids, and the blend report."""
    if said.answer is None:
        return None
    report = said.answer.report
    usage: dict[str, Any] = {"prompt_tokens": report.prompt_tokens, "completion_tokens": report.output_tokens}
    usage["total_tokens"] = report.prompt_tokens + report.output_tokens
    if said.reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": said.reasoning_tokens}
    return {"usage": usage, "token_ids": list(said.answer.token_ids), "blend": CallReport.of(report)}


def said_at_once(answer: Answer, ending: Ending) -> Said:
    """Return a whole answer."""
    tokens = None if ending.thinking is None else answer.reasoning_tokens
    return Said(answer.text, answer.thoughts, answer=answer, reasoning_tokens=tokens)


def responses(stream: BlendStream, ending: Ending, make: Callable[[Said], R]) -> Generator[R, None, None]:
    """Yield a response for each piece up to the first stop string, and an empty one with the raw response at the end."""
    said = Said()
    with closing(ending.pieces(stream)) as pieces:
        for piece in pieces:
            said = said.more(piece, ending)
            yield make(said)


async def aresponses(stream: BlendStream, ending: Ending, make: Callable[[Said], R]) -> AsyncGenerator[R, None]:
    """Yield responses asynchronously; see `responses`. The generation ends soon after reading stops."""
    said = Said()
    async with aclosing(ending.apieces(stream)) as pieces:
        async for piece in pieces:
            said = said.more(piece, ending)
            yield make(said)
