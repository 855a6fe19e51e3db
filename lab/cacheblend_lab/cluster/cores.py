"""Cores that everything shares, and how fast work goes on them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from cacheblend_rag.errors import ConfigError

__all__ = ["Cores", "Sharing"]


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of one machine that all replicas are on, with what else they share: caches, and the memory's bandwidth.

    Attributes
    ----------
    powers : tuple of float
        Work that one busy thread, two and so on do together in the time that one alone does 1, which is the first. More threads
        than these do what the last says.
    """

    powers: tuple[float, ...]

    def __post_init__(self) -> None:
        is_right = self.powers[:1] == (1.0,) and all(
            0 < power <= threads for threads, power in enumerate(self.powers, 1)
        )
        if not is_right:
            raise ConfigError(
                f"cores with the powers {self.powers}: the first must be 1, the n-th above 0 and at most n"
            )

    def speed(self, demand: float) -> float:
        """Return how fast each of `demand` busy threads goes on, 1 being alone."""
        if demand <= 1:
            return 1.0
        threads = int(demand)
        if threads >= len(self.powers):
            return self.powers[-1] / demand
        below, above = self.powers[threads - 1 : threads + 1]
        return (below + (above - below) * (demand - threads)) / demand


class Sharing:
    """Work under way, all of it slowed alike by what else there is; without cores in common, nothing slows anything.

    Time goes on in the work's own measure, so that one queue says what is done next however often speeds change.
    """

    def __init__(self, cores: Cores | None) -> None:
        self._cores = cores
        self._done: list[tuple[float, int, float, Callable[[], None]]] = []
        self._numbers = count()
        self._demand = 0.0
        self._work, self._now = 0.0, 0.0
        self.used_s = 0.0

    def add(self, now: float, work_s: float, then: Callable[[], None], share: float = 1.0) -> None:
        """Begin work that takes `work_s` alone, and has a core busy for a share of that; `then` is called when it is done."""
        self._go_on(now)
        heapq.heappush(self._done, (self._work + work_s, next(self._numbers), share, then))
        self._demand += share

    def next_at(self) -> float:
        """Return when the next work is done, if nothing changes."""
        if not self._done:
            return float("inf")
        return self._now + max(self._done[0][0] - self._work, 0.0) / self._speed()

    def finish(self, now: float) -> Callable[[], None]:
        """Take away what is done at that time, and return what is to be called."""
        self._go_on(now)
        work, _, share, then = heapq.heappop(self._done)
        # Without what rounding has left of a moment.
        self._work = max(self._work, work)
        self._demand = max(self._demand - share, 0.0) if self._done else 0.0
        return then

    def _go_on(self, now: float) -> None:
        speed = self._speed()
        self._work += (now - self._now) * speed
        self.used_s += (now - self._now) * speed * self._demand
        self._now = now

    def _speed(self) -> float:
        return 1.0 if self._cores is None else self._cores.speed(self._demand)
