"""Contents of each tier in the long run, by Che's approximation, for corpora that cannot be played through.

An LRU cache of C KVs holds one that is asked for at rate r with probability ``1 - exp(-r T)``, where T, the time for which an
unused one stays, is such that these probabilities sum up to C (Che, Tung and Wang, 2002). Here KV is asked for at its home at one
rate, and at every other replica at a smaller one; a chunk has two, of its own rates each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cacheblend_lab.cluster.caches import Capacities
from cacheblend_lab.cluster.costs import Reads
from cacheblend_lab.cluster.workload import Workload

__all__ = ["SteadyCaches"]

_LONGEST = 1e18
_STEPS = 200


class SteadyCaches:
    """Draws where chunks are from how likely that is in the long run; times are counted in requests of the whole cluster.

    `home_share` of the chunks are asked for at their home.
    """

    def __init__(
        self,
        workload: Workload,
        replicas: int,
        capacities: Capacities,
        chunk_bytes: float,
        home_share: float,
        rng: np.random.Generator,
    ) -> None:
        popularity, rates = workload.popularity, workload.kv_rates
        self._workload, self._rng = workload, rng
        # Groups of documents by the KVs of a document: as many of each kind, and the rate of one.
        counts = np.repeat(popularity.counts[:, None].astype(np.float64), rates.shape[1], axis=1)
        away_share = (1 - home_share) / max(replicas - 1, 1)
        homes = np.full_like(rates, 1 / replicas)
        kinds = [(rates * home_share, counts * homes)]
        if replicas > 1:
            kinds.append((rates * away_share, counts * (1 - homes)))
        ram, disk, remote = capacities.chunks(chunk_bytes)
        ram_s, disk_s = (_stay(kinds, room) for room in (ram, max(disk, ram)))
        # A row for home and one for elsewhere: in RAM; near.
        at = [rate for rate, _ in kinds] + [kinds[0][0]] * (replicas == 1)
        self._in_ram = [_held(rate, ram_s) for rate in at]
        self._near = [_held(rate, disk_s) for rate in at]
        far = rates * (home_share * (1 - self._near[0]) + (1 - home_share) * (1 - self._near[1]))
        self._missing = np.zeros_like(rates)
        if remote is not None:
            self._missing = 1 - _held(far, _stay([(far, counts)], remote))
        weight = rates * counts / (rates * counts).sum()
        both = (home_share, 1 - home_share)
        self.ram_share = float(
            sum(share * (weight * held).sum() for share, held in zip(both, self._in_ram, strict=True))
        )
        self.near_share = float(
            sum(share * (weight * held).sum() for share, held in zip(both, self._near, strict=True))
        )
        gone = far * self._missing * counts
        self.missing_share = float(gone.sum() / (rates * counts).sum())
        # Lists, since chunks are looked up one by one, which arrays are slow at.
        self._edges = popularity.edges.tolist()
        self._at = [(in_ram.tolist(), near.tolist()) for in_ram, near in zip(self._in_ram, self._near, strict=True)]
        self._gone = self._missing.tolist()
        self._chances: list[float] = []

    def read(self, replica: int, chunks: Sequence[int], homes: Sequence[int]) -> Reads:
        """Draw where the chunks are."""
        places = self._workload.chunks_per_document
        ram = disk = remote = missing = 0
        for number, (chunk, home) in enumerate(zip(chunks, homes, strict=True)):
            document, place = divmod(chunk, places)
            if number == 0:
                # KV of the first place in a prompt stands behind that of the others.
                place += places
            group = bisect_right(self._edges, document) - 1
            in_ram, near = self._at[home != replica]
            chance = self._chance()
            if chance < in_ram[group][place]:
                ram += 1
            elif chance < near[group][place]:
                disk += 1
            elif self._chance() >= self._gone[group][place]:
                remote += 1
            else:
                missing += 1
        return Reads(ram, disk, remote, missing)

    def _chance(self) -> float:
        if not self._chances:
            self._chances = self._rng.random(4096).tolist()
        return self._chances.pop()


def _held(rates: NDArray[np.float64], stay: float) -> NDArray[np.float64]:
    held: NDArray[np.float64] = -np.expm1(-rates * stay)
    return held


def _stay(kinds: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]], room: int) -> float:
    """Return how long unused KV stays in a cache with room for so many, of kinds given by their rates and counts."""
    if room <= 0:
        return 0.0
    if sum(float(counts[rates > 0].sum()) for rates, counts in kinds) <= room:
        return _LONGEST
    return _solve(lambda stay: sum(float((counts * _held(rates, stay)).sum()) for rates, counts in kinds), room)


def _solve(grows: Callable[[float], float], target: float) -> float:
    """Return where a growing function reaches a target, by halving in the logarithm."""
    low, high = 1e-9, _LONGEST
    for _ in range(_STEPS):
        middle = float(np.sqrt(low * high))
        if grows(middle) < target:
            low = middle
        else:
            high = middle
        if high / low < 1 + 1e-6:
            break
    return float(np.sqrt(low * high))
