"""Spreads over questions, and how alike two rankings are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.errors import ConfigError

__all__ = ["Spread", "rank_correlation", "spread"]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values and their quartiles; NaN where there is no value."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of those values that are numbers."""
    given = np.asarray(values, dtype=np.float64)
    given = given[~np.isnan(given)]
    if not given.size:
        return Spread(np.nan, np.nan, np.nan)
    low, median, high = (float(each) for each in np.percentile(given, (25, 50, 75)))
    return Spread(median, low, high)


def rank_correlation(one: Sequence[float] | NDArray[np.float64], other: Sequence[float] | NDArray[np.float64]) -> float:
    """Return Spearman's rank correlation: Pearson's of the ranks, of equal values their mean; NaN where all of one are equal."""
    first, second = (_ranks(np.asarray(values, dtype=np.float64)) for values in (one, other))
    if first.shape != second.shape:
        raise ConfigError(f"{first.size} values cannot be ranked against {second.size}; give as many of each")
    first, second = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / scale if scale > 0 else float("nan")


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last: NDArray[np.float64] = np.cumsum(counts).astype(np.float64)
    ranks: NDArray[np.float64] = (last - (counts - 1) / 2)[places]
    return ranks
