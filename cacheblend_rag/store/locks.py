"""Locks, and whatever else has to be in order when a process forks."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Protocol

__all__ = ["ForkSafeLock", "Forked", "Forking", "tell_after_fork", "tell_before_fork"]


class Forking(Protocol):
    """Something that has to do with forks."""

    def before_fork(self) -> None:
        """Let go of what a child must not inherit; every `ForkSafeLock` is held by the calling thread."""


class Forked(Protocol):
    """Something that goes on in a forked child without the parent's threads."""

    def after_fork(self) -> None:
        """Give up what the parent's threads have under way; called in the child while it has no other thread."""


class ForkSafeLock:
    """A mutual exclusion that a forked child finds free, with nobody half way through what it guards.

    Every such lock is taken before a fork and released on both sides of it. So that this cannot deadlock, a thread holds at
    most one of them at a time, neither forks nor logs while holding it, and no finalizer takes one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        with _registry_lock:
            _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def acquire(self, blocking: bool = True) -> bool:
        """Wait until nobody holds the lock, then hold it; without `blocking`, return False if somebody does."""
        return self._lock.acquire(blocking)

    def release(self) -> None:
        """Let the next one have it."""
        self._lock.release()


def tell_before_fork(party: Forking) -> None:
    """Call `party.before_fork` before each fork for as long as `party` lives."""
    with _registry_lock:
        _parties.add(party)


def tell_after_fork(party: Forked) -> None:
    """Call `party.after_fork` in each forked child for as long as `party` lives."""
    with _registry_lock:
        _forked.add(party)


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()
_parties: weakref.WeakSet[Forking] = weakref.WeakSet()
_forked: weakref.WeakSet[Forked] = weakref.WeakSet()
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


def _after_fork_in_child() -> None:
    _after_fork()
    for party in list(_forked):
        party.after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
