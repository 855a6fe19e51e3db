"""Prompts over stored chunks, made of a task's contexts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

from cacheblend_attachments.answers import written_after
from cacheblend_lab.eval.retrieve import Retriever
from cacheblend_lab.eval.task import EvalContext, EvalQuestion, EvalTask
from cacheblend_rag.chunk import BlendPrompt, Chunk
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import PromptTooLongError

__all__ = ["Inquiry", "inquire"]


@dataclass(frozen=True)
class Inquiry:
    """One question with the chunks that it is answered from.

    Attributes
    ----------
    task : EvalTask
        What stands around them.
    ids : tuple of str
        The ids of the chunks in the store, in order.
    question : str
        What is asked.
    max_new_tokens : int
        Most tokens of the answer.
    texts : tuple of str
        The texts of the chunks.
    right : str
        A right answer as the model would write it, where methods are to say how likely they find it; else empty.
    """

    task: EvalTask
    ids: tuple[str, ...]
    question: str
    max_new_tokens: int
    texts: tuple[str, ...] = ()
    right: str = ""

    @property
    def tail(self) -> str:
        """Text after the chunks, with the question."""
        # Not str.format: braces of code in a tail or a question stand for themselves.
        return self.task.tail.replace("{question}", self.question)

    @property
    def prompt(self) -> BlendPrompt:
        """The prompt with its chunks by their ids."""
        return BlendPrompt(self.task.head, self.ids, self.tail, self.task.separator)

    def over(self, texts: Sequence[str]) -> BlendPrompt:
        """Return the prompt with other texts in place of the chunks, none of them stored."""
        segments: list[str] = [self.task.head] if self.task.head else []
        for number, text in enumerate(texts):
            if number and self.task.separator:
                segments.append(self.task.separator)
            segments.append(text)
        return BlendPrompt(segments=[*segments, self.tail])


@contextmanager
def inquire(
    task: EvalTask,
    context: EvalContext,
    retriever: Retriever,
    engines: Collection[BlendEngine],
    max_new_tokens: int | None = None,
    wanted: Collection[str] | None = None,
    losses: bool = False,
) -> Iterator[list[tuple[EvalQuestion, Inquiry | str]]]:
    """Store the chunks of one context in engines for the duration of a ``with`` block, in which its questions can be asked.

    Each question, all or the wanted ones, comes with its chunks, or with the reason why it cannot be asked.
    """
    if task.chunked:
        texts, documents = list(context.texts), list(context.documents)
        filled = [number for number, text in enumerate(texts) if text.strip()]
        rows: Sequence[Sequence[int]] = [
            filled if question.chunks is None else question.chunks for question in context.questions
        ]
    else:
        # All questions of the context, whichever are wanted: the same batch gives the same vectors.
        texts, documents, rows = retriever.retrieve(context)
    chosen = [
        (question, numbers)
        for question, numbers in zip(context.questions, rows, strict=True)
        if wanted is None or question.id in wanted
    ]
    if not any(numbers for _, numbers in chosen):
        yield [(question, "its context has no text") for question, _ in chosen]
        return
    chunks = _chunks(texts, documents, {number for _, numbers in chosen for number in numbers}, task.separator)
    limit = max_new_tokens or task.max_new_tokens
    inquiries = []
    for question, numbers in chosen:
        ids, own = tuple(_name(number) for number in numbers), tuple(texts[number] for number in numbers)
        asked = Inquiry(task, ids, question.text, limit, own)
        if losses:
            asked = replace(asked, right=written_after(question.answers[0], asked.tail))
        inquiries.append((question, asked))
    try:
        why: str | None = None
        try:
            for engine in engines:
                engine.add(chunks)
        except PromptTooLongError as error:
            why = str(error)
        yield [(question, why or asked) for question, asked in inquiries]
    finally:
        for engine in engines:
            engine.delete([str(chunk.id) for chunk in chunks])


def _name(number: int) -> str:
    return f"chunk {number}"


def _chunks(texts: Sequence[str], lengths: Sequence[int], wanted: Collection[int], separator: str) -> list[Chunk]:
    """Return some of the chunks of a context; where they are of documents, all chunks of these documents."""
    if not lengths:
        return [Chunk(texts[number], _name(number)) for number in sorted(wanted)]
    found = []
    for document, (length, end) in enumerate(zip(lengths, accumulate(lengths), strict=True)):
        members = range(end - length, end)
        if any(number in wanted for number in members):
            start = 0
            for number in members:
                found.append(Chunk(texts[number], _name(number), document=f"document {document}", start=start))
                start += len(texts[number]) + len(separator)
    return found
