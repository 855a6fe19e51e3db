"""A lock that survives a fork."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType

__all__ = ["ForkSafeLock"]


class ForkSafeLock:
    """A mutual exclusion that a forked child finds free, with nobody half way through what it guards.

    Every such lock is taken before a fork and released on both sides of it. So that this cannot deadlock, a thread holds at most
    one of them at a time, never forks while holding it, and no finalizer takes one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        with _registry_lock:
            _registry.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def acquire(self) -> None:
        """Wait until nobody holds the lock, then hold it."""
        self._lock.acquire()

    def release(self) -> None:
        """Let the next one have it."""
        self._lock.release()


_registry: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()
_registry_lock = threading.Lock()
_held_over_fork: list[ForkSafeLock] = []


def _before_fork() -> None:
    _registry_lock.acquire()
    for lock in list(_registry):
        lock.acquire()
        _held_over_fork.append(lock)


def _after_fork() -> None:
    while _held_over_fork:
        _held_over_fork.pop().release()
    _registry_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
