"""The store's own time, which changes of the wall clock do not upset."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cacheblend_rag.store.database import Database
from cacheblend_rag.store.locks import ForkSafeLock

__all__ = ["StoreClock", "steady_s"]

_SAVED = "SELECT now, wall FROM moment"


def steady_s() -> float:
    """Return seconds since some moment, running on while the machine sleeps and never set."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


class StoreClock:
    """Seconds that only grow: the wall clock's when the store was made, carried on by a clock that nobody can set.

    The store writes its time down together with the wall clock's. While a process has the store open, its time passes as the
    steady clock's does, whatever the wall clock shows. While nobody has it open, as much time passes as the wall clock says, and
    none if that has been set back. So a wall clock that is wrong for a while does no harm while the store is open, and no
    lasting harm at any time.

    Parameters
    ----------
    wall : callable
        The wall clock, in seconds.
    steady : callable
        The steady clock, in seconds.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = steady_s) -> None:
        self._wall = wall
        self._steady = steady
        self._lock = ForkSafeLock()
        self._now = wall()
        self._at = steady()

    def load(self, database: Database) -> None:
        """Go on from the time that was written down, if any was."""

        def read() -> Any:
            with database.read() as connection:
                return connection.execute(_SAVED).fetchone()

        saved = database.healing(read)
        if saved is not None:
            with self._lock:
                self._now = saved[0] + max(0.0, self._wall() - saved[1])
                self._at = self._steady()

    def save(self, database: Database) -> None:
        """Write the time down."""
        # Beforehand, since a thread holds one lock at a time.
        now = self.now()

        def write() -> None:
            with database.write() as connection:
                saved = connection.execute(_SAVED).fetchone()
                latest = now if saved is None else max(now, saved[0])
                connection.execute("INSERT OR REPLACE INTO moment VALUES (1, ?, ?)", (latest, self._wall()))

        database.healing(write)

    def ahead_s(self) -> float:
        """Return how far it is ahead of the wall clock, by which other machines' stores are told times."""
        return self.now() - self._wall()

    def now(self) -> float:
        """Return the store's time."""
        with self._lock:
            return self._now + max(0.0, self._steady() - self._at)
