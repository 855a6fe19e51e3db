"""How much is let in: requests of a key in a minute, and answers at the same time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cacheblend_rag.errors import PromptError

__all__ = ["Gate", "Overload", "Rates"]


class Overload(Exception):
    """A request that is not let in now.

    Attributes
    ----------
    retry_after_s : float
        When it may come again.
    is_rate : bool
        Whether its sender asks too often, rather than everybody together too much.
    """

    def __init__(self, message: str, retry_after_s: float, *, is_rate: bool) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_rate = is_rate


class Rates:
    """Lets each sender make so many requests a minute, in a bucket that fills steadily and holds a minute's.

    Parameters
    ----------
    clock : callable
        Seconds, from any moment on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, sender: str, per_minute: int | None) -> None:
        """Count a request; `Overload` if it is one too many. None sets no limit."""
        if per_minute is None:
            return
        with self._lock:
            now = self._clock()
            left, seen = self._left.get(sender, (float(per_minute), now))
            left = min(left + (now - seen) * per_minute / 60, float(per_minute))
            if left < 1:
                self._left[sender] = (left, now)
                raise Overload(
                    f"this key has had its {per_minute} requests of a minute; ask again later, or ask for a larger share",
                    (1 - left) * 60 / per_minute,
                    is_rate=True,
                )
            self._left[sender] = (left - 1, now)


class Gate:
    """Lets so many requests in at the same time, and none once it is closed.

    Parameters
    ----------
    most : int
        How many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._inside = 0
        self._closed_at = math.inf

    @property
    def is_open(self) -> bool:
        """Whether requests are let in, if there is room."""
        return self._closed_at == math.inf

    @contextmanager
    def pass_through(self, places: int = 1) -> Iterator[None]:
        """Be inside for the time of a ``with`` block, in the places of so many requests.

        Raises
        ------
        PromptError
            If there are never so many.
        Overload
            If they are not free, or the gate is closed.
        """
        if places > self._most:
            raise PromptError(
                f"the request has {places} prompts, and this server answers {self._most} at the same time; send fewer at once"
            )
        with self._changed:
            if not self.is_open:
                raise Overload(
                    "this server is about to stop; ask another one, or the same in a moment", 5, is_rate=False
                )
            if self._inside + places > self._most:
                raise Overload(
                    f"{self._inside} requests are being answered, of {self._most} at the same time; ask again in a moment",
                    1,
                    is_rate=False,
                )
            self._inside += places
        try:
            yield
        finally:
            with self._changed:
                self._inside -= places
                self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more."""
        # Without the lock, which whoever is interrupted by a signal may have.
        self._closed_at = min(self._closed_at, time.monotonic())

    def drain(self, most_s: float) -> bool:
        """Close, and wait for those inside up to so many seconds after that; return whether all have gone."""
        self.close()
        with self._changed:
            left = self._closed_at + most_s - time.monotonic()
            return self._changed.wait_for(lambda: not self._inside, max(left, 0))
