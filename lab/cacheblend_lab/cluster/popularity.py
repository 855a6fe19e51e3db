"""Popularity of documents: Zipf's law, over millions of them in a few thousand groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.errors import ConfigError

__all__ = ["Popularity", "fit_zipf"]

# Documents that are a group of their own, and by how much further groups grow: rates within one differ by as little.
_SINGLE = 2048
_GROWTH = 1.02
_MOST_EXPONENT = 4.0


class Popularity:
    """Documents by rank, from 0; the n-th, counted from 1, is asked for with a probability proportional to ``n ** -exponent``.

    Attributes
    ----------
    size : int
        How many there are.
    edges, counts, shares : ndarray
        For each group of documents its first rank, then the end of the last one; how many are in it; and the probability of
        each of them.
    """

    def __init__(self, size: int, exponent: float) -> None:
        if size < 1 or not 0 <= exponent <= _MOST_EXPONENT:
            raise ConfigError(f"{size} documents with exponent {exponent} are no corpus; give 1 or more, and 0 to 4")
        self.size = size
        self.exponent = exponent
        edges = [*range(min(size, _SINGLE) + 1)]
        while edges[-1] < size:
            edges.append(min(size, int(edges[-1] * _GROWTH) + 1))
        self.edges: NDArray[np.int64] = np.array(edges, dtype=np.int64)
        weights = np.arange(1, size + 1, dtype=np.float64) ** -exponent
        sums = np.add.reduceat(weights, self.edges[:-1])
        self.counts: NDArray[np.int64] = np.diff(self.edges)
        self._cumulative = np.cumsum(sums / sums.sum())
        self.shares: NDArray[np.float64] = sums / sums.sum() / self.counts

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Return `count` ranks, each drawn alone."""
        chances = np.searchsorted(self._cumulative, rng.random(count), side="right")
        groups = np.minimum(chances, len(self.counts) - 1)
        places: NDArray[np.int64] = self.edges[groups] + (rng.random(count) * self.counts[groups]).astype(np.int64)
        return places

    def share_of_first(self, part: float) -> float:
        """Return which share of requests goes to the first `part` of the documents."""
        first = max(round(part * self.size), 1)
        group = int(np.searchsorted(self.edges, first - 1, side="right")) - 1
        before = float(self._cumulative[group - 1]) if group else 0.0
        return before + float((first - self.edges[group]) * self.shares[group])


def fit_zipf(counts: Sequence[int]) -> float:
    """Return the exponent of the most likely Zipf law of how often each document was asked for.

    Documents that were never asked for must stand there with 0, or the corpus looks smaller than it is.
    """
    ordered = np.sort(np.asarray(counts, dtype=np.float64))[::-1]
    total = float(ordered.sum())
    if len(ordered) < 2 or total <= 0:
        raise ConfigError("a Zipf law needs two documents or more, and requests for them")
    logs = np.log(np.arange(1, len(ordered) + 1))
    seen = float(ordered @ logs) / total
    low, high = 0.0, _MOST_EXPONENT
    # The mean of log rank falls with the exponent; the likeliest exponent has the mean that was seen.
    while high - low > 1e-5:
        middle = (low + high) / 2
        weights = np.exp(-middle * logs)
        if float(weights @ logs) / float(weights.sum()) > seen:
            low = middle
        else:
            high = middle
    return (low + high) / 2
