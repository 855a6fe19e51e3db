"""Prompts that are blended, made of a question, a template and chunks."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate, SelectorPromptTemplate

from cacheblend_rag.chunk import BLANK_LINE, BlendPrompt, Chunk, FixedText, Segment
from cacheblend_rag.errors import PromptTooLongError
from cacheblend_rag.lexer import MARK, lexer_of
from llama_index_cacheblend.llm import BlendLLM

__all__ = ["ContextPrompt", "make_context_prompt"]

logger = logging.getLogger(__name__)

Divided = tuple[Sequence[Chunk], Sequence[Chunk], Sequence[Chunk]]
"""The chunks for which a prompt has room, those that wait for the next one, and those for which none has room."""


@dataclass(frozen=True, slots=True)
class ContextPrompt:
    """A question and its context, ready for the model.

    `text` is the whole prompt as an unblended call would give it to the model, `messages` what it was written from if that is a
    chat model, `context` what was filled in for the context, and `blend` the same prompt with its chunks told apart. Where
    `fallback_reason` says why they could not be, the prompt is prefilled in full. `left_over` are the chunks from the first on
    for which there was no room, if there are to be further prompts; for `dropped` there is no room in those either.
    """

    text: str
    messages: list[ChatMessage] | None
    context: str
    blend: BlendPrompt
    left_over: Sequence[Chunk] = ()
    dropped: Sequence[Chunk] = ()
    fallback_reason: str | None = None


def make_context_prompt(
    llm: BlendLLM,
    template: BasePromptTemplate,
    chunks: Sequence[Chunk],
    values: dict[str, Any],
    *,
    variable: str = "context_str",
    limit: int | None = None,
    refines: bool = False,
    structured: bool = False,
    keeps_head: bool = False,
) -> ContextPrompt:
    """Fill a template with chunks, the most important first, as its context; `values` are its other variables.

    The prompt holds all chunks for which there is room in `limit` tokens, whole and in their order; where it `refines`, those up
    to the first that has to wait for the next prompt. With `keeps_head`, what stands before the context is declared fixed, where
    it is certain that the template alone writes it. `PromptTooLongError` if there is room for none of the chunks.
    """
    if hasattr(template, "pml_prompt"):  # a PMLPromptTemplate, of a package that may not be there
        return _of_schema(llm, template, chunks, values, variable, limit, refines)
    # The template is filled twice: where a mark that no text can hold comes out, the context comes out too.
    mark = f"CACHEBLEND-{uuid.uuid4().hex}"
    parts = llm.render(template, structured, **values, **{variable: mark})[0].split(mark)
    context = BLANK_LINE.join(chunk.text for chunk in chunks)
    whole, messages = llm.render(template, structured, **values, **{variable: context})
    divided: Divided = (chunks, (), ())
    # A token has a byte at least, so most prompts need not be counted.
    if limit is not None and len(whole.encode("utf-8", "surrogatepass")) >= limit and len(parts) > 1 and chunks:
        divided = _fitting(llm, parts, chunks, limit, refines)
        context = BLANK_LINE.join(chunk.text for chunk in divided[0])
        whole, messages = llm.render(template, structured, **values, **{variable: context})
    kept, left_over, dropped = divided
    # What was said in it has marks for the engine, which nobody else is shown.
    text = whole.replace(MARK, "")
    # A template's function, output parser or prompt function may change the context instead of just placing it.
    if len(parts) > 1 and context.join(parts).replace(MARK, "") == text:
        between = [part for chunk in kept for part in (BLANK_LINE, chunk)][1:]
        around = [each for part in parts[1:] for each in (*between, part)]
        segments: list[Segment] = [each for each in (parts[0], *around) if each] if kept else [whole]
        if keeps_head and kept and parts[0] and _is_fixed(llm, template, values, variable, structured, parts[0]):
            segments[0] = FixedText(parts[0])
        return ContextPrompt(text, messages, context, BlendPrompt(segments=segments), left_over, dropped)
    what = f"changes {{{variable}}}" if len(parts) > 1 else f"has no {{{variable}}}, or changes it"
    reason = f"the template {what}, so the chunks cannot be told apart in the prompt"
    logger.warning("%s; it is prefilled in full", reason)
    return ContextPrompt(text, messages, context, BlendPrompt(segments=[whole]), left_over, dropped, reason)


def _of_schema(
    llm: BlendLLM,
    template: Any,
    chunks: Sequence[Chunk],
    values: dict[str, Any],
    variable: str,
    limit: int | None,
    refines: bool,
) -> ContextPrompt:
    """Put chunks into a schema's prompt, as many as there is room for."""

    def filled(some: Sequence[Chunk]) -> tuple[Any, BlendPrompt, int]:
        prompt = template.pml_prompt(**values, **{variable: [chunk.text for chunk in some]})
        blend = prompt.blend(llm.engine)
        assert blend.positions is not None and isinstance(blend.segments[-1], tuple)
        return prompt, blend, blend.positions[-1] + len(blend.segments[-1])

    def fits(some: Sequence[Chunk]) -> bool:
        return limit is None or filled(some)[2] <= limit

    divided: Divided = (chunks, (), ())
    if not fits(chunks):
        divided = _divided(llm, chunks if template.documents is not None else (), fits, refines)
    kept, left_over, dropped = divided
    prompt, blend, _ = filled(kept)
    text = prompt.plain_text()
    messages = [ChatMessage(role=MessageRole.USER, content=text)] if llm.is_chat_model else None
    return ContextPrompt(text, messages, BLANK_LINE.join(chunk.text for chunk in kept), blend, left_over, dropped)


def _fitting(llm: BlendLLM, parts: Sequence[str], chunks: Sequence[Chunk], limit: int, refines: bool) -> Divided:
    """Divide chunks for a prompt of `limit` tokens that has other text beside them."""
    lexer = lexer_of(llm.engine.tokenizer)
    room = limit - 1 - sum(len(lexer.read(part)[0]) for part in parts if part)
    sizes = {chunk: lexer.count(chunk.text) for chunk in chunks}
    separator = lexer.count(BLANK_LINE)

    def fits(some: Sequence[Chunk]) -> bool:
        size = sum(sizes[chunk] for chunk in some) + separator * (len(some) - 1)
        return (len(parts) - 1) * size <= room

    return _divided(llm, chunks, fits, refines)


def _divided(llm: BlendLLM, chunks: Sequence[Chunk], fits: Callable[[Sequence[Chunk]], bool], refines: bool) -> Divided:
    kept: list[Chunk] = []
    left_over: list[Chunk] = []
    dropped: list[Chunk] = []
    for chunk in chunks:
        if not left_over and fits([*kept, chunk]):
            kept.append(chunk)
        elif refines and fits([chunk]):
            left_over.append(chunk)
        else:
            dropped.append(chunk)
    if not kept:
        raise PromptTooLongError(
            f"the prompt (template, chat history and question) leaves no room for any of the {len(chunks)} chunks, beside "
            f"max_new_tokens={llm.max_new_tokens}, in the {llm.engine.window} tokens of the model's window or in what "
            "prompt_helper allows; split documents into shorter chunks, shorten the question, keep less of the chat in its "
            "memory (token_limit), or lower max_new_tokens"
        )
    return kept, left_over, dropped


def _is_fixed(
    llm: BlendLLM, template: BasePromptTemplate, variables: Iterable[str], context: str, structured: bool, head: str
) -> bool:
    """Return whether all that a prompt begins with, up to its context, is its template's own text.

    It is where the template, filled with marks instead of values, begins with just that. What stands before the context in a
    template that works otherwise than by variables, or has messages of a conversation there, may be a user's words.
    """
    chosen = template.select(llm) if isinstance(template, SelectorPromptTemplate) else template
    if type(chosen) not in (PromptTemplate, ChatPromptTemplate) or chosen.function_mappings:
        return False
    # What was filled in beforehand is a value too.
    names = {*variables, *template.kwargs, *chosen.kwargs, context}
    marks = {name: f"CACHEBLEND-{uuid.uuid4().hex}" for name in names}
    mark = marks[context]
    try:
        text, _ = llm.render(template, structured, **marks)
    except Exception:  # a template may want numbers, and raise what it likes
        return False
    if not text.startswith(head + mark):
        return False
    if not isinstance(chosen, ChatPromptTemplate):
        return True
    before = takewhile(lambda message: mark not in (message.content or ""), chosen.format_messages(llm=llm, **marks))
    return all(message.role == MessageRole.SYSTEM for message in before)
