"""From a task's contexts to prompts over stored chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import PromptTooLongError
from cacheblend_rag.lab.eval.pieces import Pieces
from cacheblend_rag.lab.eval.retrieve import Retriever
from cacheblend_rag.lab.eval.task import EvalContext, EvalQuestion, EvalTask

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
    others : mapping of str to Inquiry
        The same question with what methods read instead, by `EvalMethod.reads`.
    """

    task: EvalTask
    ids: tuple[str, ...]
    question: str
    max_new_tokens: int
    texts: tuple[str, ...] = ()
    others: Mapping[str, Inquiry] = field(default_factory=dict)

    @property
    def tail(self) -> str:
        """What stands behind the chunks, the question in it."""
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
) -> Iterator[list[tuple[EvalQuestion, Inquiry | str]]]:
    """Store the chunks of one context for the duration of a ``with`` block, in which its questions can be asked.

    Parameters
    ----------
    task : EvalTask
        What stands around chunks and questions; its contexts, metrics and `extract` are not used.
    context : EvalContext
        The context.
    retriever : Retriever
        Cuts and searches texts that are no chunks yet.
    engines : mapping of BlendEngine to collection of str
        In whose stores the chunks are meanwhile, and what the methods on each read beside the retrieved chunks
        (`EvalMethod.reads`).
    max_new_tokens : int, optional
        Most tokens of an answer, instead of the task's.
    wanted : collection of str, optional
        Ids of the questions that are asked; by default all of them.

    Yields
    ------
    list of tuple of (EvalQuestion, Inquiry or str)
        Each question with its chunks, or with the reason why it cannot be asked.
    """
    if task.chunked:
        texts = list(context.texts)
        filled = [number for number, text in enumerate(texts) if text.strip()]
        rows: Sequence[Sequence[int]] = [
            filled if question.chunks is None else question.chunks for question in context.questions
        ]
    else:
        # All questions of the context, whichever are wanted: the same batch gives the same vectors.
        texts, rows = retriever.retrieve(context)
    chosen = [
        (question, numbers)
        for question, numbers in zip(context.questions, rows, strict=True)
        if wanted is None or question.id in wanted
    ]
    if not any(numbers for _, numbers in chosen):
        yield [(question, "its context has no text") for question, _ in chosen]
        return
    pieces = Pieces(texts, context.documents, task.separator, task.document_tokens, retriever.count)

    def inquiry(question: EvalQuestion, numbers: Sequence[int], reads: str) -> Inquiry:
        given = pieces.read(reads, numbers)
        ids, own = tuple(str(chunk.id) for chunk in given), tuple(chunk.text for chunk in given)
        return Inquiry(task, ids, question.text, max_new_tokens or task.max_new_tokens, own)

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
