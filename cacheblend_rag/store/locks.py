"""Locks that a forked child finds free."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - its hooks run inside ours: work is submitted while our locks are held
import os
import threading
import weakref
from types import TracebackType
from typing import Protocol

__all__ = ["ForkSafeLock", "tell_before_fork"]


class _Forking(Protocol):
    def before_fork(self) -> None:
        """Let go of what a child must not inherit; every `ForkSafeLock` is held by the calling thread."""


class ForkSafeLock:
    """A mutual exclusion that a forked child finds free, with nobody half way through what it guards.

    Every such lock is taken before a fork and released on both sides of it: a child that compares process ids would notice too
    late for SQLite, and for what a thread of the parent was changing. So that this cannot deadlock, a thread holds at most one of
    them at a time, neither forks nor logs while holding it, and no finalizer takes one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acquire = self._lock.acquire
        self.release = self._lock.release
        with _registry_lock:
            _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def tell_before_fork(party: _Forking) -> None:
    """Call `party.before_fork` before each fork for as long as `party` lives."""
    with _registry_lock:
        _parties.add(party)


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()
_parties: weakref.WeakSet[_Forking] = weakref.WeakSet()
_registry_lock = threading.Lock()
_held_over_fork: list[ForkSafeLock] = []


def _before_fork() -> None:
    _registry_lock.acquire()
    for lock in list(_locks):
        lock.acquire()
        _held_over_fork.append(lock)
    for party in list(_parties):
        party.before_fork()


def _after_fork() -> None:
    while _held_over_fork:
        _held_over_fork.pop().release()
    _registry_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
