"""Tasks of an evaluation: contexts, questions, right answers, and how an answer is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cacheblend_rag.chat.render import around_context
from cacheblend_rag.errors import ConfigError

__all__ = ["EvalContext", "EvalQuestion", "EvalTask", "Metric", "at_least_one"]

Metric = Callable[[str, tuple[str, ...]], float]
"""Judges an answer against all answers that are right; from 0 to 1."""


def at_least_one(**numbers: int | None) -> None:
    """Raise ConfigError if a number, given by its setting's name, is less than 1."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")


@dataclass(frozen=True, slots=True)
class EvalQuestion:
    """One question about a context.

    Attributes
    ----------
    id : str
        Its name, unique in the task: what resuming an interrupted run goes by.
    text : str
        What is asked; empty where the instruction says it all (a summary).
    answers : tuple of str
        Every right answer, at least one.
    kind : str
        The subtask or kind of question; figures are given for each.
    chunks : tuple of int, optional
        The numbers of the context's texts that it is answered from, in the order of its prompt, where the texts are chunks
        already; by default all of them, in order.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    kind: str = "all"
    chunks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class EvalContext:
    """Context that questions are asked about.

    Attributes
    ----------
    texts : tuple of str
        Documents that are to be cut into chunks, or the chunks themselves, as the task's `chunked` says; in order.
    questions : tuple of EvalQuestion
        The questions.
    documents : tuple of int
        Where the texts are chunks of documents, how many chunks each document has; the texts are those of the first document in
        reading order, then those of the next. Empty where they are of none.
    """

    texts: tuple[str, ...]
    questions: tuple[EvalQuestion, ...]
    documents: tuple[int, ...] = ()


@dataclass(frozen=True)
class EvalTask:
    """A data set as the evaluation takes it.

    Attributes
    ----------
    name : str
        Its name.
    contexts : tuple of EvalContext
        The contexts with their questions.
    metrics : mapping of str to Metric
        How answers are judged; the first is the one that tables and plots show.
    head, tail : str
        What stands before the chunks and after them; the question stands for ``{question}`` in the tail.
    separator : str
        What stands between chunks.
    chunked : bool
        Whether the texts are chunks already, all of which are given to the model, in order, unless a question names its own.
        Otherwise they are cut into chunks of a fixed length and the nearest to the question are retrieved (CacheBlend, section
        7.1).
    chat : bool
        Whether head and tail are written as the user's message of a chat, where the model's tokenizer has a chat template.
    max_new_tokens : int
        Most tokens of an answer.
    extract : callable, optional
        Takes the value that is judged out of the model's answer; by default the answer is judged as it is, stripped.
    """

    name: str
    contexts: tuple[EvalContext, ...]
    metrics: Mapping[str, Metric]
    head: str = ""
    tail: str = "{question}"
    separator: str = "\n\n"
    chunked: bool = False
    chat: bool = False
    max_new_tokens: int = 32
    extract: Callable[[str], str] = field(default=str.strip)

    def written_for(self, tokenizer: Any) -> EvalTask:
        """Return the task with the chat template of a tokenizer around its prompts, where it is to be there."""
        if not self.chat or not getattr(tokenizer, "chat_template", None):
            return self
        head, tail = around_context(tokenizer, self.head, self.tail)
        return replace(self, head=head, tail=tail, chat=False)

    def mean_chunks(self, top_k: int) -> float:
        """Return how many chunks a question's prompt has, on average: `top_k`, where texts are cut, and else all."""
        if not self.chunked:
            return float(top_k)
        counts = [
            sum(bool(text.strip()) for text in context.texts) if question.chunks is None else len(question.chunks)
            for context in self.contexts
            for question in context.questions
        ]
        return sum(counts) / max(1, len(counts))
