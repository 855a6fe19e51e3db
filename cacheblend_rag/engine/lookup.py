"""Prompt look-up: an answer that quotes goes on as its prompt does, so what may come next is computed with the next token.

Each guess is checked by the model's own scores (speculative decoding, Leviathan et al., arXiv 2211.17192; with the prompt as the
draft, Saxena, "Prompt Lookup Decoding", 2023), so an answer is what it is without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

import torch

__all__ = ["Lookup", "Pace", "is_clear"]

# Tokens that must stand in the text as the answer ends for what follows there to be guessed, and up to how many are compared.
_LEAST, _MOST = 3, 32
# Matches of fewer tokens than these are counted apart, each as if some guesses were right, of so many, before any was seen.
_LENGTHS = (5, 9, 17, _MOST + 1)
_PRIOR = ((2.0, 4.0), (6.0, 8.0), (9.0, 10.0), (19.0, 20.0))
# After so many guesses the older ones count half.
_REMEMBERED = 64
# Rows of a step with guesses, and what they are taken to cost until that is known: so much more than half as many.
_ROWS = (4, 8, 16)
_ASSUMED = 1.5
# Less is not worth a step whose guesses may be wrong.
_LEAST_GAIN = 1.1


class Pace:
    """What steps of several rows cost a model, and how often guesses are right, learnt while it decodes by who has the model."""

    def __init__(self, most: int = _ROWS[-1] - 1) -> None:
        self._most = most
        self._seconds: float | None = None
        # In steps of one row.
        self._costs: dict[int, deque[float]] = {rows: deque(maxlen=8) for rows in _ROWS}
        self._right = [list(prior) for prior in _PRIOR]

    def note_step(self, rows: int, seconds: float) -> None:
        """Note how long a step took."""
        if rows == 1:
            self._seconds = seconds if self._seconds is None else 0.8 * self._seconds + 0.2 * seconds
        elif self._seconds and rows in self._costs:
            self._costs[rows].append(seconds / self._seconds)

    def note_guess(self, matched: int, is_right: bool) -> None:
        """Note whether a guess was right that followed so many tokens that matched."""
        counts = self._right[_kind(matched)]
        counts[0] += is_right
        counts[1] += 1
        if counts[1] > _REMEMBERED:
            counts[:] = (count / 2 for count in counts)

    def guesses(self, matched: int, available: int) -> int:
        """Return how many tokens to guess after so many that matched: as many as gain most tokens in the time, or none."""
        right, tried = self._right[_kind(matched)]
        chance = min(right / tried, 0.99)
        gains, cost = {0: _LEAST_GAIN}, 1.0
        for rows in _ROWS:
            if rows - 1 <= min(available, self._most) and self._seconds is not None:
                cost = median([_ASSUMED * cost, *self._costs[rows]])
                gains[rows - 1] = (1 - chance**rows) / (1 - chance) / cost
        return max(gains, key=gains.__getitem__)


class Lookup:
    """The text of a prompt and its answer, in which what the answer may go on with is looked up.

    Parameters
    ----------
    token_ids : sequence of int
        The prompt's.
    pace : Pace
        The model's.
    """

    def __init__(self, token_ids: Sequence[int], pace: Pace) -> None:
        self.pace = pace
        self._ids = list(token_ids)
        # Behind the last place where each run of tokens stands.
        self._places = {tuple(token_ids[end - _LEAST : end]): end for end in range(_LEAST, len(token_ids))}
        # Where the text goes on as the answer may, and how many tokens match there.
        self._place, self._matched = len(self._ids), 0
        self._open: deque[int] = deque()
        self._behind = 0

    def add(self, token: int) -> None:
        """Take the answer's next token."""
        ids = self._ids
        if self._open:
            is_right = token == self._open.popleft()
            self.pace.note_guess(self._behind, is_right)
            if not is_right:
                self._open.clear()
        goes_on = self._place < len(ids) and ids[self._place] == token
        ids.append(token)
        end = tuple(ids[-_LEAST:])
        if goes_on:
            self._place, self._matched = self._place + 1, self._matched + 1
        if not goes_on or self._matched < _LEAST:
            self._place = self._places.get(end, len(ids))
            self._matched = self._match() if self._place < len(ids) else 0
        self._places[end] = len(ids)

    def _match(self) -> int:
        ids, count = self._ids, 0
        while count < min(self._place, _MOST) and ids[self._place - 1 - count] == ids[-1 - count]:
            count += 1
        return count

    def guess(self, most: int) -> list[int]:
        """Return what may follow, at most so many tokens."""
        if self._matched < _LEAST:
            return []
        count = self.pace.guesses(self._matched, min(most, len(self._ids) - self._place))
        found = self._ids[self._place : self._place + count]
        self._open, self._behind = deque(found), self._matched
        return found


def is_clear(scores: torch.Tensor, tolerance: float) -> bool:
    """Whether the greatest score, ``(vocab,)``, is so far ahead that rounding, other in steps of other rows, changes nothing."""
    first, second = scores.topk(2).values.tolist()
    return bool(first - second > tolerance)


def _kind(matched: int) -> int:
    return next((number for number, length in enumerate(_LENGTHS) if matched < length), len(_LENGTHS) - 1)
