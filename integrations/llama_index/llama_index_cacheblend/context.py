"""Prompts that are blended, made of a question, a template and chunks: one, or several where what has no room is refined."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate, SelectorPromptTemplate
from llama_index.core.schema import NodeWithScore

from cacheblend_rag.chunk import BLANK_LINE, BlendPrompt, Chunk, FixedText, Segment, text_hash
from cacheblend_rag.engine import Engine
from cacheblend_rag.errors import PromptTooLongError, StoreError
from cacheblend_rag.lexer import MARK, lexer_of
from cacheblend_rag.report import CallReport
from llama_index_cacheblend.llm import BlendLLM
from llama_index_cacheblend.report import AnswerReport, annotate, warn_of_other_texts

__all__ = ["ContextPrompt", "ModelResponse", "Rounds", "make_context_prompt"]

logger = logging.getLogger(__name__)

ModelResponse = ChatResponse | CompletionResponse


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
    left_over: tuple[Chunk, ...] = ()
    dropped: tuple[Chunk, ...] = ()
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
    it is certain that the template alone writes it.

    Raises
    ------
    PromptTooLongError
        If there is room for none of the chunks, or not even for what stands around them.
    """
    if hasattr(template, "pml_prompt"):  # a PMLPromptTemplate, of a package that may not be there
        return _of_schema(llm, template, chunks, values, variable, limit, refines)
    # The template is filled twice: where a mark that no text can hold comes out, the context comes out too.
    mark = f"CACHEBLEND-{uuid.uuid4().hex}"
    parts = llm.render(template, structured, **values, **{variable: mark})[0].split(mark)
    context = BLANK_LINE.join(chunk.text for chunk in chunks)
    whole, messages = llm.render(template, structured, **values, **{variable: context})
    kept, left_over, dropped = chunks, tuple[Chunk, ...](), tuple[Chunk, ...]()
    # A token has a byte at least, so most prompts need not be counted.
    if limit is not None and len(whole.encode("utf-8", "surrogatepass")) >= limit and len(parts) > 1 and chunks:
        kept, left_over, dropped = _fitting(llm, parts, chunks, limit, refines)
        context = BLANK_LINE.join(chunk.text for chunk in kept)
        whole, messages = llm.render(template, structured, **values, **{variable: context})
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

    kept, left_over, dropped = tuple(chunks), tuple[Chunk, ...](), tuple[Chunk, ...]()
    if template.documents is not None and not fits(kept):
        kept, left_over, dropped = _divided(chunks, fits, refines)
    prompt, blend, size = filled(kept or chunks[:1])
    if limit is not None and size > limit:
        raise PromptTooLongError(
            f"the prompt of schema {template.prompt.schema.name!r} reaches position {size} with only its first "
            f"document, but {limit} are left beside max_new_tokens={llm.max_new_tokens}; split documents into shorter chunks, or "
            "lower max_new_tokens"
        )
    text = prompt.plain_text()
    messages = [ChatMessage(role=MessageRole.USER, content=text)] if llm.is_chat_model else None
    return ContextPrompt(text, messages, BLANK_LINE.join(chunk.text for chunk in kept), blend, left_over, dropped)


def _fitting(
    llm: BlendLLM, parts: Sequence[str], chunks: Sequence[Chunk], limit: int, refines: bool
) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...], tuple[Chunk, ...]]:
    """Divide chunks as `_divided` does, for a prompt of `limit` tokens that has other text beside them."""

    def length(text: str) -> int:
        return len(lexer_of(llm.engine.tokenizer).read(text)[0])

    around = 1 + sum(length(part) for part in parts if part)
    room = limit - around
    if room < 1:
        raise PromptTooLongError(
            f"without any chunk, the prompt (template, chat history and question) already has {around} tokens, but {limit} is "
            f"the limit beside max_new_tokens={llm.max_new_tokens}; shorten the question, keep less of the chat in its memory "
            "(token_limit), or lower max_new_tokens"
        )
    # What was added is not tokenised again.
    named = [chunk.id for chunk in chunks if chunk.id is not None]
    try:
        records = llm.engine.records(named)
    except StoreError:
        # The engine says so when it asks for them itself.
        records = []
    known = {(record.id, record.text_hash): record for record in records if record is not None}
    separator, sizes = length(BLANK_LINE), dict[Chunk, int]()
    for chunk in chunks:
        record = known.get((chunk.id or "", text_hash(chunk.text)))
        sizes[chunk] = lexer_of(llm.engine.tokenizer).count(chunk.text) if record is None else len(record.token_ids)

    def fits(some: Sequence[Chunk]) -> bool:
        size = sum(sizes[chunk] for chunk in some) + separator * (len(some) - 1)
        return (len(parts) - 1) * size <= room

    kept, left_over, dropped = _divided(chunks, fits, refines)
    if not kept:
        raise PromptTooLongError(
            f"chunk {chunks[0].id!r} has {sizes[chunks[0]]} tokens, but of the {limit} that a prompt may have beside "
            f"max_new_tokens={llm.max_new_tokens}, template and question leave {room}, since they take {around}; "
            f"{'no other chunk is short enough either; ' if len(chunks) > 1 else ''}split documents into shorter chunks, or "
            "lower max_new_tokens"
        )
    return kept, left_over, dropped


def _divided(
    chunks: Sequence[Chunk], fits: Callable[[Sequence[Chunk]], bool], refines: bool
) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...], tuple[Chunk, ...]]:
    """Return the chunks for which a prompt has room, those that wait for the next one, and those for which none has room."""
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
    return tuple(kept), tuple(left_over), tuple(dropped)


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


@dataclass
class Rounds:
    """State of a question: what has been asked, and what is still to be asked.

    Attributes
    ----------
    query_str : str
        The question.
    chunks : sequence of Chunk
        The context that no call has read yet.
    values : dict
        Further variables of the templates.
    answer : str or None
        The answer so far.
    report : dict
        What ``response.metadata["blend"]`` will be.
    streams : bool
        Whether the answer comes piece by piece.
    earlier_calls : list of CallReport
        The reports of the calls before the last.
    dropped : list of Chunk
        Context that no call has read or will read.
    last : str, BaseModel or None
        The answer so far, as it was read from what the model wrote.
    sources : sequence of NodeWithScore
        Copies of the source nodes, to be annotated with what the report says of them.
    engine : BlendEngine or ServedEngine or None
        The engine that answers.
    """

    query_str: str
    chunks: Sequence[Chunk]
    values: dict[str, Any]
    answer: str | None
    report: dict[str, Any]
    streams: bool
    earlier_calls: list[CallReport] = field(default_factory=list)
    dropped: list[Chunk] = field(default_factory=list)
    last: str | BaseModel | None = None
    sources: Sequence[NodeWithScore] = ()
    engine: Engine | None = None

    def refine(self, prompt: ContextPrompt, response: ModelResponse, answer: str | BaseModel) -> None:
        """Go on to the chunks that the last prompt left over."""
        # LlamaIndex starts over where a model wrote nothing.
        self.last = answer or self.last
        self.answer = self.last.model_dump_json() if isinstance(self.last, BaseModel) else self.last or self.answer
        self.chunks = prompt.left_over
        self.dropped += prompt.dropped
        self.earlier_calls.append(_call_report(prompt, response))

    def end(self, prompt: ContextPrompt, response: ModelResponse) -> None:
        """Fill the report; `response` is the last call's."""
        self._fill(_call_report(prompt, response), [*self.dropped, *prompt.dropped])

    def give_up(self) -> None:
        """Fill the report; the call that answered last is the last, since beside its answer no chunk has room any more."""
        self._fill(self.earlier_calls.pop(), [*self.dropped, *self.chunks])

    def _fill(self, report: CallReport, dropped: Sequence[Chunk]) -> None:
        if self.engine is not None:
            warn_of_other_texts(self.engine, [*self.earlier_calls, report])
        left_out = [chunk.id for chunk in dropped]
        if isinstance(self.report, AnswerReport):
            self.report.fill(report, self.earlier_calls, left_out)
        else:
            self.report.update(report, dropped=left_out, earlier_calls=self.earlier_calls)
        annotate(self.sources, self.report)


def _call_report(prompt: ContextPrompt, response: ModelResponse) -> CallReport:
    assert response.raw is not None
    report: CallReport = response.raw["blend"]
    if prompt.fallback_reason is None:
        return report
    changed = CallReport(report | {"fallback_reason": prompt.fallback_reason})
    changed.last = report.last and replace(report.last, fallback_reason=prompt.fallback_reason)
    return changed
