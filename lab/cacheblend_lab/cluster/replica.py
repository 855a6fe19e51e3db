"""One replica: a queue, prefills one after the other, answers decoded together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cacheblend_lab.cluster.cores import Sharing
from cacheblend_lab.cluster.costs import Costs, Reads

__all__ = ["Replica", "Request"]

# Steps after which those that wait may join answers that are being written.
_STEPS_BETWEEN = 8


@dataclass(slots=True, eq=False)
class Request:
    """A request in the simulator; times are the simulator's."""

    number: int
    came_at: float
    prefill_s: float
    steps_left: int
    reads: Reads
    first_at: float = 0.0


class Replica:
    """Plays one replica's model; `ended` is called with a request and the time when its answer is written."""

    def __init__(
        self, costs: Costs, sharing: Sharing, clock: Callable[[], float], ended: Callable[[Request], None]
    ) -> None:
        self._costs, self._sharing, self._clock, self._ended = costs, sharing, clock, ended
        self._waiting: deque[Request] = deque()
        self._written: list[Request] = []
        self._is_busy = False
        self.busy_s = 0.0
        self._since = 0.0

    def take(self, request: Request) -> None:
        """Put a request into the queue."""
        self._waiting.append(request)
        if not self._is_busy:
            self._is_busy, self._since = True, self._clock()
            self._go_on()

    def _go_on(self) -> None:
        """Prefill the requests that may be taken now, then decode; rest where there are none."""
        room = self._costs.answers_at_once - len(self._written)
        may_join = self._costs.joins_midway or not self._written
        taken = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))] if may_join else []
        if taken:
            self._work(sum(each.prefill_s for each in taken), lambda: self._have_begun(taken))
        elif self._written:
            self._decode()
        else:
            self._is_busy = False
            self.busy_s += self._clock() - self._since

    def _have_begun(self, taken: list[Request]) -> None:
        for each in taken:
            each.first_at = self._clock()
            each.steps_left -= 1
        self._written += taken
        self._end_written()
        if self._written:
            self._decode()
        else:
            self._go_on()

    def _decode(self) -> None:
        steps = min(each.steps_left for each in self._written)
        if self._costs.joins_midway:
            steps = min(steps, _STEPS_BETWEEN)
        self._work(self._costs.decode_s(len(self._written), steps), lambda: self._have_written(steps))

    def _have_written(self, steps: int) -> None:
        for each in self._written:
            each.steps_left -= steps
        self._end_written()
        self._go_on()

    def _end_written(self) -> None:
        ended = [each for each in self._written if not each.steps_left]
        self._written = [each for each in self._written if each.steps_left]
        for each in ended:
            self._ended(each)

    def _work(self, seconds: float, then: Callable[[], None]) -> None:
        self._sharing.add(self._clock(), seconds, then, self._costs.busy_share)
