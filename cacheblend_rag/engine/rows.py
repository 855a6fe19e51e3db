"""What ends, steers and times each row of a batch, seen by itself and without its padding."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

__all__ = ["RowEnds", "RowProcessor"]


class RowEnds(StoppingCriteria):
    """Ends each row of a batch by its own measure, and notes after how many tokens, and when, that was.

    Parameters
    ----------
    width : int
        Columns of the padded prompts.
    starts : sequence of int
        The column of each row's first token.
    limits : sequence of int
        Most tokens of each answer.
    end_ids : collection of int
        Tokens that end an answer.
    criteria : sequence of sequence of StoppingCriteria
        Further criteria of each row, which see it as a batch of one without padding.
    shared : sequence of StoppingCriteria
        Criteria that look at the last tokens of each row only, and see all rows at once.
    stop : threading.Event
        Ends all rows at the next token.

    Attributes
    ----------
    counts : list of (int or None)
        The tokens of each row's answer; None while it goes on.
    times : list of float
        When each token was there, by `time.perf_counter`.
    """

    def __init__(
        self,
        width: int,
        starts: Sequence[int],
        limits: Sequence[int],
        end_ids: Collection[int],
        criteria: Sequence[Sequence[StoppingCriteria]],
        shared: Sequence[StoppingCriteria],
        stop: threading.Event,
    ) -> None:
        self._width = width
        self._starts = starts
        self._limits = limits
        self._end_ids = frozenset(end_ids)
        self._criteria = criteria
        self._shared = shared
        self._stop = stop
        self.counts: list[int | None] = [None] * len(starts)
        self.times: list[float] = []

    def count(self, row: int) -> int:
        """Return the tokens of a row's answer, once the batch has ended."""
        ended = self.counts[row]
        return len(self.times) if ended is None else ended

    def tpot_s(self, row: int) -> float | None:
        """Return the seconds per token of a row's answer after the first; None with fewer than two."""
        count = self.count(row)
        return None if count < 2 else (self.times[count - 1] - self.times[0]) / (count - 1)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether each row is done."""
        self.times.append(time.perf_counter())
        count = input_ids.shape[1] - self._width
        newest = input_ids[:, -1].tolist()
        together = [each(input_ids, scores, **kwargs).tolist() for each in self._shared]
        for row, start in enumerate(self._starts):
            if self.counts[row] is not None:
                continue
            own = input_ids[row : row + 1, start:]
            if (
                count >= self._limits[row]
                or newest[row] in self._end_ids
                or any(done[row] for done in together)
                # A list, since each may have to see every token.
                or any([bool(each(own, None, **kwargs)) for each in self._criteria[row]])
            ):
                self.counts[row] = count
        ended = self._stop.is_set() or not threading.main_thread().is_alive()
        done = [ended or each is not None for each in self.counts]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)


class RowProcessor(LogitsProcessor):
    """Applies each row's own logits processors to it, as to a batch of one without padding.

    Parameters
    ----------
    starts : sequence of int
        The column of each row's first token.
    processors : sequence of sequence of LogitsProcessor
        Those of each row.
    """

    def __init__(self, starts: Sequence[int], processors: Sequence[Sequence[LogitsProcessor]]) -> None:
        self._starts = starts
        self._processors = processors

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, ``(rows, vocab)``, as the processors change them."""
        rows = []
        for row, start in enumerate(self._starts):
            own, changed = input_ids[row : row + 1, start:], scores[row : row + 1]
            for each in self._processors[row]:
                changed = each(own, changed)
            rows.append(changed)
        return torch.cat(rows)
