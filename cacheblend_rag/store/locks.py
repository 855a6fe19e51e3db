"""Locks that a forked child finds free, and turns at a store that processes share."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - its hooks run inside ours: work is submitted while our locks are held
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol

__all__ = ["ForkSafeLock", "Turns", "let_go", "tell_before_fork"]

_POLL_S = 0.005


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


class Turns:
    """Any number of threads and processes fill a store; somebody who looks for what was left half done does so while nobody does.

    With a `path`, the system lets go for a process that is killed. Where the folder is not writable nobody's turn comes.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = ForkSafeLock()
        # Without a path: how many fill the store, less than 0 while somebody is alone.
        self._filling = 0

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Take part in filling the store, as soon as nobody is alone with it; a thread may do so twice."""
        with self._taken(fcntl.LOCK_SH):
            yield

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Be alone with the store, if nobody is filling it now; gives whether that is so."""
        with self._taken(fcntl.LOCK_EX | fcntl.LOCK_NB) as is_taken:
            yield is_taken

    @contextmanager
    def _taken(self, how: int) -> Iterator[bool]:
        if self._path is None:
            step = 1 if how == fcntl.LOCK_SH else -1
            while not (is_taken := self._enter(step)) and step > 0:
                time.sleep(_POLL_S)
            try:
                yield is_taken
            finally:
                if is_taken:
                    with self._lock:
                        self._filling -= step
            return
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield False
            return
        try:
            try:
                fcntl.flock(fd, how)
                is_taken = True
            except BlockingIOError:
                is_taken = False
            yield is_taken
        finally:
            let_go(fd)

    def _enter(self, step: int) -> bool:
        with self._lock:
            is_free = self._filling >= 0 if step > 0 else self._filling == 0
            self._filling += step if is_free else 0
            return is_free


def let_go(fd: int) -> None:
    """Unlock a file and close it: closing alone would leave it locked for as long as a child lives that was forked meanwhile."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


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
