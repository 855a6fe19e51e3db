"""Who has a model: one computation at a time, and prompts that wait for it together."""

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
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from cacheblend_rag.errors import AnswerTimeoutError, CacheBlendError, ConfigError
from cacheblend_rag.model import Decoder, before_layers, unwrapped

__all__ = ["GaveWayError", "Patience", "Scheduler", "aside", "scheduler_of"]

_OMP_PAUSE_SOFT = 1
# Of GNU's OpenMP, by which torch computes on Linux.
_pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None) if sys.platform == "linux" else None
# Seconds after which a call that waits looks whether its answer is still wanted.
_GLANCE_S = 0.2


def _end_workers() -> None:
    """End the threads that this thread's kernels are shared out to; the next kernel begins new ones."""
    # GNU's runtime lets workers wait awake only as long as there are no more of them than processors: where a second thread
    # has computed, every kernel waits for its workers to wake up, which makes small models 1.6 times slower.
    if _pause is not None and torch.get_num_threads() > 1:
        _pause(_OMP_PAUSE_SOFT)


@dataclass
class Patience:
    """How long a call waits for a model while others have it: until it has had it once, for then it is being answered."""

    # When to give up, by `time.perf_counter`; None waits as long as it takes.
    until: float | None = None

    @classmethod
    def of(cls, wait_s: float | None) -> Patience:
        """Return the patience of a call that waits that many seconds from now on, None for as long as it takes."""
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


class Scheduler:
    """Lets one computation at a time have a model; threads have it in the order in which they came, and may take it again."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._depth = 0
        self._line: deque[object] = deque()

    def __enter__(self) -> None:
        self.take(Patience())

    def __exit__(self, *_: object) -> None:
        self.leave()

    @contextmanager
    def within(self, patience: Patience) -> Iterator[None]:
        """Take the model, unless that takes longer than a call may wait, which is an `AnswerTimeoutError`."""
        self.take(patience)
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def after_others(self) -> Iterator[None]:
        """Take the model when no other thread waits for it."""
        with self._changed:
            if not self.is_mine:
                self._changed.wait_for(lambda: self._owner is None and not self._line)
                self._owner = threading.get_ident()
            self._depth += 1
        try:
            yield
        finally:
            self.leave()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has the model."""
        return self._owner == threading.get_ident()

    @property
    def wanted(self) -> bool:
        """Whether a thread waits in line."""
        return bool(self._line)

    def take(self, patience: Patience, place: object = None, is_given_up: Callable[[], bool] | None = None) -> bool:
        """Wait for the model and take it; return False if another thread picked `place` out of the line."""
        place = object() if place is None else place
        with self._changed:
            if not self.is_mine:
                self._line.append(place)
                try:
                    while self._owner is not None or self._line[0] is not place:
                        left_s = patience.left_s
                        if left_s <= 0:
                            raise AnswerTimeoutError(
                                "the model was busy with other calls for as long as this one may wait; "
                                "let it wait longer, or make fewer calls at once"
                            )
                        if is_given_up is not None:
                            left_s = min(left_s, _GLANCE_S)
                        self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
                        if place not in self._line:
                            return False
                        if is_given_up is not None and is_given_up():
                            raise CacheBlendError("the answer was cancelled before it began; try again")
                    self._owner = threading.get_ident()
                finally:
                    if place in self._line:
                        self._line.remove(place)
                    self._changed.notify_all()
            self._depth += 1
        patience.until = None
        return True

    def leave(self) -> None:
        """Let the next in line have the model, once this thread has left it as often as it took it."""
        if self._depth == 1:
            _end_workers()
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._changed.notify_all()

    def line(self) -> list[object]:
        """Return what stands in the line, the oldest first."""
        with self._changed:
            return list(self._line)

    def pick(self, place: object) -> bool:
        """Take out of the line what another thread waits with; return whether it was still there."""
        with self._changed:
            if place not in self._line:
                return False
            self._line.remove(place)
            self._changed.notify_all()
            return True


_schedulers: WeakKeyDictionary[PreTrainedModel, Scheduler] = WeakKeyDictionary()


def scheduler_of(model: PreTrainedModel) -> Scheduler:
    """Return a model's scheduler: one for all engines that are made on it, and on what PEFT or torch.compile put around it."""
    # One call, which threads cannot get between.
    found = _schedulers.setdefault(unwrapped(model), Scheduler())
    if found.process != os.getpid():
        # Of a process that this one was forked from, whose threads may have had the model.
        found = _schedulers[unwrapped(model)] = Scheduler()
    return found


class GaveWayError(Exception):
    """What was computed aside was left on the way."""


@contextmanager
def aside(scheduler: Scheduler, decoder: Decoder, is_over: Callable[[], bool]) -> Iterator[None]:
    """Take a model when no thread waits for it; leave this thread's forwards between two layers when one does or `is_over`."""
    device, thread = decoder.device, threading.get_ident()

    def check(*_: Any) -> None:
        if threading.get_ident() != thread:
            return
        if device.type == "cuda":
            # Otherwise all layers would be under way before the first is computed.
            torch.cuda.current_stream(device).synchronize()
        if scheduler.wanted or is_over():
            raise GaveWayError

    with scheduler.after_others():
        check()
        with before_layers(decoder.layers, check):
            yield
