"""Prompts over stored chunks, made of a task's contexts."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate

from cacheblend_attachments.answers import written_after
from cacheblend_lab.eval.methods import BEHIND_OTHER, BEHIND_SHUFFLED, DOCUMENTS
from cacheblend_lab.eval.retrieve import Retriever
from cacheblend_lab.eval.task import EvalContext, EvalQuestion, EvalTask
from cacheblend_rag.chunk import BlendPrompt, Chunk
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import PromptTooLongError

__all__ = ["Inquiry", "Pieces", "inquire"]


class Pieces:
    """Names the chunks of a context by what a method reads, and knows which of them have to be stored for that.

    Attributes
    ----------
    stored : dict of str to (dict of str to Chunk)
        For each thing that was read, all chunks that it takes, by id: of a document that one is a piece of, every piece. The
        retrieved chunks and those of whole documents are under "".
    """

    def __init__(
        self,
        texts: Sequence[str],
        lengths: Sequence[int],
        separator: str,
        limit: int | None,
        count: Callable[[str], int],
    ) -> None:
        self._texts = texts
        self._separator = separator
        self._limit = limit
        self._count = count
        self._documents = [range(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
        self._of = [place for place, numbers in enumerate(self._documents) for _ in numbers]
        self.stored: dict[str, dict[str, Chunk]] = {reads: {} for reads in ("", BEHIND_OTHER, BEHIND_SHUFFLED)}

    def read(self, reads: str, numbers: Sequence[int]) -> list[Chunk]:
        """Return the chunks of a prompt: what the method reads (`EvalMethod.reads`) for the retrieved chunks, in order."""
        if reads == BEHIND_OTHER:
            return [self._after(reads, number, self._other(number)) for number in numbers]
        if reads == BEHIND_SHUFFLED:
            return [self._after(reads, number, self._shuffled(number)) for number in numbers]
        return [self._own(number) for number in (self._whole(numbers) if reads == DOCUMENTS else numbers)]

    def _own(self, number: int) -> Chunk:
        name, stored = f"chunk {number}", self.stored[""]
        if name not in stored:
            if self._of:
                document = self._of[number]
                members = self._documents[document]
                self._store(stored, f"document {document}", ((f"chunk {member}", member) for member in members))
            else:
                stored[name] = Chunk(self._texts[number], name)
        return stored[name]

    def _after(self, reads: str, number: int, before: Sequence[int]) -> Chunk:
        """Return a chunk that ends a document of its own, in which certain others stand before it."""
        name, stored = f"{reads} {number}", self.stored[reads]
        if name not in stored:
            self._store(stored, name, [*((f"{name}, {other}", other) for other in before), (name, number)])
        return stored[name]

    def _store(self, stored: dict[str, Chunk], document: str, members: Iterable[tuple[str, int]]) -> None:
        start = 0
        for name, number in members:
            text = self._texts[number]
            stored[name] = Chunk(text, name, document=document, start=start)
            start += len(text) + len(self._separator)

    def _other(self, number: int) -> Sequence[int]:
        document = self._of[number]
        other = (document + 1) % len(self._documents)
        return () if other == document else self._documents[other]

    def _shuffled(self, number: int) -> Sequence[int]:
        """Return the chunks before one in its document in random order; in another than their own where there is one."""
        before = [*range(self._documents[self._of[number]].start, number)]
        rng, mixed = random.Random(number), before
        while len(before) > 1 and mixed == before:
            mixed = rng.sample(before, len(before))
        return mixed

    def _whole(self, numbers: Sequence[int]) -> list[int]:
        """Return the chunks of the documents that chunks come from, in the order in which these are found, until the length is
        full.
        """
        chosen: list[int] = []
        tokens = 0
        for document in dict.fromkeys(self._of[number] for number in numbers):
            members = self._documents[document]
            tokens += sum(self._count(self._texts[member] + self._separator) for member in members)
            if chosen and self._limit is not None and tokens > self._limit:
                break
            chosen += members
        return chosen


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
    others : mapping of str to Inquiry
        The same question with what methods read instead, by `EvalMethod.reads`.
    """

    task: EvalTask
    ids: tuple[str, ...]
    question: str
    max_new_tokens: int
    texts: tuple[str, ...] = ()
    right: str = ""
    others: Mapping[str, Inquiry] = field(default_factory=dict)

    @property
    def tail(self) -> str:
        """Text after the chunks, with the question."""
        # Not str.format: braces of code in a tail or a question stand for themselves.
        return self.task.tail.replace("{question}", self.question)

    @property
    def prompt(self) -> BlendPrompt:
        """The prompt with its chunks by their ids."""
        return BlendPrompt(self.task.head, self.ids, self.tail, self.task.separator)

    def reading(self, reads: str) -> Inquiry:
        """Return the question with the chunks that a method reads (`EvalMethod.reads`)."""
        return self.others[reads] if reads else self

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
    engines: Mapping[BlendEngine, Collection[str]],
    max_new_tokens: int | None = None,
    wanted: Collection[str] | None = None,
    losses: bool = False,
) -> Iterator[list[tuple[EvalQuestion, Inquiry | str]]]:
    """Store the chunks of one context for the duration of a ``with`` block, in which its questions can be asked.

    `engines` say in whose stores, and what the methods on each read beside the retrieved chunks (`EvalMethod.reads`). Each
    question, all or the wanted ones, comes with its chunks, or with the reason why it cannot be asked.
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
    pieces = Pieces(texts, documents, task.separator, task.document_tokens, retriever.count)

    def inquiry(question: EvalQuestion, numbers: Sequence[int], reads: str) -> Inquiry:
        given = pieces.read(reads, numbers)
        ids, own = tuple(str(chunk.id) for chunk in given), tuple(chunk.text for chunk in given)
        asked = Inquiry(task, ids, question.text, max_new_tokens or task.max_new_tokens, own)
        if not losses:
            return asked
        return replace(asked, right=written_after(question.answers[0], asked.tail))

    reads = {name for names in engines.values() for name in names}
    inquiries = [
        (
            question,
            replace(inquiry(question, numbers, ""), others={name: inquiry(question, numbers, name) for name in reads}),
        )
        for question, numbers in chosen
    ]
    # What is read of whole documents is stored with the retrieved chunks.
    stored = {
        engine: {id: chunk for name in ("", *names) for id, chunk in pieces.stored.get(name, {}).items()}
        for engine, names in engines.items()
    }
    try:
        why: str | None = None
        try:
            for engine, chunks in stored.items():
                engine.add(chunks.values())
        except PromptTooLongError as error:
            why = str(error)
        yield [(question, why or asked) for question, asked in inquiries]
    finally:
        for engine, chunks in stored.items():
            engine.delete(list(chunks))
