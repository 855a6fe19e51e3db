"""Taking times, and what is told of many."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

__all__ = ["median_ratio", "percentiles", "seconds_of", "wait_for_device"]


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long something takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def wait_for_device(device: str) -> None:
    """Wait until a device has done all it was asked to; the CPU always has."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over the rounds of one method's time over another's in the same round.

    What disturbs the machine for a round disturbs both, so that this is steadier than the ratio of their medians.
    """
    return median(own / other for own, other in zip(times, others, strict=True))


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the 99th percentile and the greatest of at least one time."""
    ranked = sorted(times)
    return ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100], ranked[-1]
