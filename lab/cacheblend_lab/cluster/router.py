"""Routing of a request: to any replica, or to the one that its documents belong to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.errors import ConfigError

__all__ = ["ROUTERS", "Router", "homes_of"]

ROUTERS = ("affinity", "random")
"""Ways to route requests: near what they name, or the less busy of two at random."""


def homes_of(documents: NDArray[np.int64], replicas: int) -> NDArray[np.int64]:
    """Return each document's replica by rendezvous hashing: the one whose number and the document's hash highest together."""
    best = np.zeros(documents.shape, dtype=np.uint64)
    homes = np.zeros(documents.shape, dtype=np.int64)
    with np.errstate(over="ignore"):
        mixed = _mix(documents.astype(np.uint64))
        for replica in range(replicas):
            score = _mix(mixed ^ _mix(np.full(1, replica + 1, dtype=np.uint64)))
            higher = score > best
            best = np.where(higher, score, best)
            homes = np.where(higher, replica, homes)
    return homes


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return hashes of numbers (splitmix64)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = numbers ^ (numbers >> np.uint64(31))
    return mixed


class Router:
    """Chooses replicas.

    "affinity" prefers the replica at which most of a request's chunks are at home, unless its queue is longer than the shortest
    by more than `queue_bound`: then, and with "random" always, it is the less busy of two at random.
    """

    def __init__(self, kind: str, replicas: int, queue_bound: int, rng: np.random.Generator) -> None:
        if kind not in ROUTERS:
            raise ConfigError(f"router {kind!r} is not known; give {' or '.join(ROUTERS)}")
        self._near = kind == "affinity"
        self._replicas = replicas
        self._bound = queue_bound
        self._rng = rng
        self._pairs: list[list[int]] = []

    def choose(self, homes: Sequence[int], queues: Sequence[int]) -> int:
        """Return a request's replica, by where each of its chunks is at home and the requests that each replica has."""
        if self._replicas == 1:
            return 0
        if self._near:
            chunks: dict[int, int] = {}
            for home in homes:
                chunks[home] = chunks.get(home, 0) + 1
            most = max(chunks.values())
            free = min((home for home, count in chunks.items() if count == most), key=queues.__getitem__)
            if queues[free] <= min(queues) + self._bound:
                return free
        one, other = self._pair()
        return one if queues[one] <= queues[other] else other

    def _pair(self) -> list[int]:
        """Return two different replicas."""
        if not self._pairs:
            # Drawn many at once, which numpy does as fast as one.
            first = self._rng.integers(self._replicas, size=1024)
            step = self._rng.integers(1, self._replicas, size=1024)
            self._pairs = np.stack([first, (first + step) % self._replicas], axis=1).tolist()
        return self._pairs.pop()
