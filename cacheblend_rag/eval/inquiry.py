"""From a task's contexts to prompts over stored chunks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cacheblend_rag.chunk import BlendPrompt, Chunk
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import PromptTooLongError
from cacheblend_rag.eval.retrieve import Retriever
from cacheblend_rag.eval.task import EvalContext, EvalQuestion, EvalTask

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
    """

    task: EvalTask
    ids: tuple[str, ...]
    question: str
    max_new_tokens: int
    texts: tuple[str, ...] = ()

    @property
    def tail(self) -> str:
        """What stands behind the chunks, the question in it."""
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
    engines : collection of BlendEngine
        In whose stores the chunks are meanwhile.
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
        texts = [text for text in context.texts if text.strip()]
        rows: Sequence[Sequence[int]] = [range(len(texts)) for _ in context.questions]
    else:
        # All questions of the context, whichever are wanted: the same batch gives the same vectors.
        texts, rows = retriever.retrieve(context)
    chosen = [
        (question, numbers)
        for question, numbers in zip(context.questions, rows, strict=True)
        if wanted is None or question.id in wanted
    ]
    if not texts:
        yield [(question, "its context has no text") for question, _ in chosen]
        return
    used = sorted({number for _, numbers in chosen for number in numbers})
    chunks = {number: Chunk(texts[number], f"chunk {number}") for number in used}
    ids = [str(chunk.id) for chunk in chunks.values()]
    try:
        why: str | None = None
        try:
            for engine in engines:
                engine.add(chunks.values())
        except PromptTooLongError as error:
            why = str(error)
        asked: list[tuple[EvalQuestion, Inquiry | str]] = []
        for question, numbers in chosen:
            names = tuple(str(chunks[number].id) for number in numbers)
            given = tuple(chunks[number].text for number in numbers)
            inquiry = Inquiry(task, names, question.text, max_new_tokens or task.max_new_tokens, given)
            asked.append((question, why or inquiry))
        yield asked
    finally:
        for engine in engines:
            engine.delete(ids)
