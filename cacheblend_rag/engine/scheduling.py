"""The lock that lets one computation at a time have a model."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from cacheblend_rag.errors import AnswerTimeoutError, ConfigError
from cacheblend_rag.model import Decoder, uncompiled, unwrapped

__all__ = ["GaveWayError", "Patience", "SchedulerLock", "aside", "scheduler_lock"]


_OMP_PAUSE_SOFT = 1


def _omp_pause() -> Callable[[int], int] | None:
    """Return ``omp_pause_resource_all`` of GNU's OpenMP, by which torch computes on Linux; None elsewhere."""
    if sys.platform != "linux":
        return None
    try:
        pause: Callable[[int], int] = ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError):
        return None
    return pause


_pause = _omp_pause()


def _end_workers() -> None:
    """End the threads that this thread's kernels are shared out to; the next kernel begins new ones.

    Each thread that computes has workers of its own. GNU's runtime lets them wait awake for the next kernel only as long as there
    are no more of them than processors: where a second thread has computed, every kernel waits for its workers to wake up, which
    makes small models 1.6 times slower. Ending them takes as long as a few kernels.
    """
    if _pause is not None and torch.get_num_threads() > 1:
        _pause(_OMP_PAUSE_SOFT)


@dataclass
class Patience:
    """How long a call waits for a model while others have it: until it has had it once, for then it is being answered.

    Attributes
    ----------
    until : float or None
        When to give up, by `time.perf_counter`; None waits as long as it takes.
    """

    until: float | None = None

    @classmethod
    def of(cls, wait_s: float | None) -> Patience:
        """Return the patience of a call that waits so many seconds from now on, None for as long as it takes.

        Raises
        ------
        ConfigError
            If it is no number of seconds.
        """
        if wait_s is None:
            return cls()
        if not (isinstance(wait_s, int | float) and wait_s >= 0):
            raise ConfigError(
                f"wait_s={wait_s!r} must be a number of seconds from 0 upwards; leave it out for no limit"
            )
        return cls(time.perf_counter() + wait_s)

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite where there is no limit."""
        return math.inf if self.until is None else self.until - time.perf_counter()

    def error(self) -> AnswerTimeoutError:
        """Return what is raised when nothing is left."""
        return AnswerTimeoutError(
            "other calls held the model for all of the time that this one may wait, so it was given up; let it wait longer, or "
            "make fewer calls at once"
        )


class _Line:
    """The threads of one process that have or want a lock."""

    def __init__(self, owner: int | None = None, depth: int = 0) -> None:
        self.changed = threading.Condition()
        self.owner = owner
        self.depth = depth
        self.waiting: deque[object] = deque()


class SchedulerLock:
    """A lock on the model that threads get in the order in which they came; a thread that has it may take it again.

    A loop that encodes batch after batch would take an ordinary lock again before any prompt that waits for it woke up. In a
    forked child it is free, unless the thread that forked has it.
    """

    def __init__(self) -> None:
        self._lines = {os.getpid(): _Line()}

    @property
    def _line(self) -> _Line:
        """The line of this process."""
        pid = os.getpid()
        if pid not in self._lines:
            # The parent's other threads are gone; the one that forked is the main thread here. `setdefault` is one step.
            before, main = next(reversed(self._lines.values())), threading.main_thread().ident
            mine = _Line(before.owner, before.depth) if before.owner == main else _Line()
            self._lines.setdefault(pid, mine)
        return self._lines[pid]

    def __enter__(self) -> None:
        self._take(Patience())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    @contextmanager
    def within(self, patience: Patience) -> Iterator[None]:
        """Take the model, unless that takes longer than a call may wait.

        Parameters
        ----------
        patience : Patience
            How long.

        Raises
        ------
        AnswerTimeoutError
            If others have the model, or are before this thread in the line, for as long as that.
        """
        self._take(patience)
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def after_others(self) -> Iterator[None]:
        """Take the model when nobody else waits for it."""
        line = self._line
        with line.changed:
            if line.owner != threading.get_ident():
                line.changed.wait_for(lambda: line.owner is None and not line.waiting)
                line.owner = threading.get_ident()
            line.depth += 1
        try:
            yield
        finally:
            self._leave()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the model."""
        return self._line.owner == threading.get_ident()

    @property
    def wanted(self) -> bool:
        """Whether a thread waits in line."""
        return bool(self._line.waiting)

    def _take(self, patience: Patience) -> None:
        line = self._line
        with line.changed:
            if line.owner != threading.get_ident():
                place = object()
                line.waiting.append(place)
                try:
                    left_s = min(patience.left_s, threading.TIMEOUT_MAX)
                    if not line.changed.wait_for(lambda: line.owner is None and line.waiting[0] is place, left_s):
                        raise patience.error()
                    line.owner = threading.get_ident()
                finally:
                    line.waiting.remove(place)
                    line.changed.notify_all()
            line.depth += 1
        patience.until = None

    def _leave(self) -> None:
        line = self._line
        if line.depth == 1:
            _end_workers()
        with line.changed:
            line.depth -= 1
            if not line.depth:
                line.owner = None
                line.changed.notify_all()


_locks: WeakKeyDictionary[PreTrainedModel, SchedulerLock] = WeakKeyDictionary()


def scheduler_lock(model: PreTrainedModel) -> SchedulerLock:
    """Return the lock on a model: one for all engines that are made on it, and on what PEFT or torch.compile put around it."""
    # One call, which threads cannot get between.
    return _locks.setdefault(unwrapped(model), SchedulerLock())


class GaveWayError(Exception):
    """What was computed aside was left on the way."""


@contextmanager
def aside(lock: SchedulerLock, decoder: Decoder, is_over: Callable[[], bool]) -> Iterator[None]:
    """Take a model when nobody waits for it, and leave this thread's forwards between two layers when somebody does or `is_over`.

    Raises
    ------
    GaveWayError
        Out of the forward, or at once.
    """
    device, thread = decoder.device, threading.get_ident()

    def check(*_: Any) -> None:
        if threading.get_ident() != thread:
            return
        if device.type == "cuda":
            # Otherwise all layers would be under way before the first is computed.
            torch.cuda.current_stream(device).synchronize()
        if lock.wanted or is_over():
            raise GaveWayError

    with lock.after_others():
        check()
        hooks = [layer.register_forward_pre_hook(check) for layer in decoder.layers]
        try:
            with uncompiled(decoder.model):
                yield
        finally:
            for hook in hooks:
                hook.remove()
