"""The questions of a data set while it is read, and the task that comes of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cacheblend_rag.errors import DatasetError
from cacheblend_rag.lab.eval.datasets.records import Record
from cacheblend_rag.lab.eval.task import EvalContext, EvalQuestion, EvalTask, Metric

__all__ = ["Collector"]

logger = logging.getLogger(__name__)


class Collector:
    """Takes questions until there are enough, sees that their ids differ, and counts the records that are left out.

    Parameters
    ----------
    name : str
        The task's name.
    path : Path
        Where it is read from, for messages.
    limit : int or None
        Most questions.
    """

    def __init__(self, name: str, path: Path, limit: int | None) -> None:
        self._name = name
        self._path = path
        self._limit = limit
        self._contexts: list[EvalContext] = []
        self._numbers: dict[str, int] = {}
        self._left_out: Counter[str] = Counter()

    @property
    def full(self) -> bool:
        """Whether there are as many questions as wanted."""
        return self._limit is not None and len(self._contexts) >= self._limit

    def add(self, record: Record, question: EvalQuestion, texts: Sequence[str]) -> None:
        """Take a record's question.

        Raises
        ------
        DatasetError
            If an earlier record has the same id, or there are no texts.
        """
        if question.id in self._numbers:
            raise record.error(f"the id {question.id!r} is that of record {self._numbers[question.id]} too")
        if not texts:
            raise record.error("there is no text to answer from")
        self._numbers[question.id] = record.number
        self._contexts.append(EvalContext(tuple(texts), (question,)))

    def leave_out(self, reason: str) -> None:
        """Count a record that its format itself calls unusable, or is known to hold."""
        self._left_out[reason] += 1

    def task(
        self,
        metrics: Mapping[str, Metric],
        *,
        head: str,
        tail: str,
        separator: str = "\n\n",
        chunked: bool = False,
        max_new_tokens: int = 32,
        extract: Callable[[str], str] = str.strip,
    ) -> EvalTask:
        """Return the task, and log how many records were left out and why; the parameters are the attributes of `EvalTask`.

        Raises
        ------
        DatasetError
            If there is no question.
        ConfigError
            If a metric needs a package that is not installed.
        """
        said = "; ".join(f"{count} with {reason}" for reason, count in self._left_out.items())
        if not self._contexts:
            raise DatasetError(f"{self._path} holds no question" + (f" (left out: {said})" if said else ""))
        if said:
            logger.warning("%s: %d questions; records left out: %s", self._path, len(self._contexts), said)
        for metric in metrics.values():
            # A package that is missing is said now, and not after the first answer.
            metric("probe", ("probe",))
        return EvalTask(
            name=self._name,
            contexts=tuple(self._contexts),
            metrics=metrics,
            head=head,
            tail=tail,
            separator=separator,
            chunked=chunked,
            max_new_tokens=max_new_tokens,
            extract=extract,
        )
