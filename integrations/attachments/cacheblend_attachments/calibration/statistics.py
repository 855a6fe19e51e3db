"""Intervals of means, of shares and of paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.errors import ConfigError

__all__ = ["Bootstrap", "Interval"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and the 95 % interval of it: the 2.5th and the 97.5th percentile of its bootstrap replicates."""

    mean: float
    low: float
    high: float


class Bootstrap:
    """Resamples whole contexts with replacement, since questions about one context are not independent.

    Where every context has one question, that is resampling questions. Every interval of one object comes from the same
    draws, so that a difference is paired and the order of calls does not matter.

    The draws follow from the seed.
    """

    def __init__(self, resamples: int = 2_000, seed: int = 0) -> None:
        if resamples < 1:
            raise ConfigError(f"resamples={resamples} must be at least 1")
        self._resamples = resamples
        self._seed = seed
        self._weights: dict[int, np.ndarray] = {}

    def weights(self, clusters: int) -> np.ndarray:
        """Return how often each replicate draws each of `clusters` clusters, float64, ``(resamples, clusters)``."""
        if clusters not in self._weights:
            # Drawing takes much longer than using what was drawn.
            draws = np.random.default_rng(self._seed).multinomial(
                clusters, np.full(clusters, 1 / clusters), size=self._resamples
            )
            self._weights[clusters] = draws.astype(np.float64)
        return self._weights[clusters]

    def interval(self, values: Sequence[float], clusters: Sequence[int]) -> Interval:
        """Return the mean of values, one for each question or pair, and its interval; `clusters` are the questions' contexts."""
        return self.share(values, np.ones(len(values)), clusters)

    def share(
        self,
        parts: Sequence[float] | NDArray[np.float64],
        wholes: Sequence[float] | NDArray[np.float64],
        clusters: Sequence[int],
    ) -> Interval:
        """Return the sum of some values over that of others, of the same questions in their contexts, and its interval."""
        _, numbers = np.unique(np.asarray(clusters), return_inverse=True)
        given, of = (np.asarray(each, dtype=np.float64) for each in (parts, wholes))
        above, below = (np.bincount(numbers, weights=each) for each in (given, of))
        weights = self.weights(len(below))
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high = np.percentile((weights @ above) / (weights @ below), (2.5, 97.5))
            return Interval(float(given.sum() / of.sum()), float(low), float(high))
