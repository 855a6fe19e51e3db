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
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from cacheblend_rag.errors import AnswerTimeoutError, CacheBlendError, ConfigError
from cacheblend_rag.model import unwrapped

__all__ = ["GLANCE_S", "Scheduler", "deadline_of", "scheduler_of"]

_OMP_PAUSE_SOFT = 1
# Of GNU's OpenMP, by which torch computes on Linux.
_pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None) if sys.platform == "linux" else None
GLANCE_S = 0.2
"""Seconds after which a call that waits looks whether its answer is still wanted."""


def _end_workers() -> None:
    """End the threads that this thread's kernels are shared out to; the next kernel begins new ones."""
    # GNU's runtime lets workers wait awake only as long as there are no more of them than processors: where a second thread
    # has computed, every kernel waits for its workers to wake up, which makes small models 1.6 times slower.
    if _pause is not None and torch.get_num_threads() > 1:
        _pause(_OMP_PAUSE_SOFT)


class Scheduler:
    """Lets one computation at a time have a model; threads have it in the order in which they came, and may take it again."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._depth = 0
        self._queue: deque[object] = deque()

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.leave()

    @contextmanager
    def after_others(self) -> Iterator[None]:
        """Take the model when no other thread waits for it."""
        with self._changed:
            if not self.is_mine:
                self._changed.wait_for(lambda: self._owner is None and not self._queue)
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
        return bool(self._queue)

    @property
    def queue(self) -> list[object]:
        """What stands in line for the model, the oldest first."""
        with self._changed:
            return list(self._queue)

    def take(
        self, place: object = None, deadline: float = math.inf, is_given_up: Callable[[], bool] | None = None
    ) -> bool:
        """Wait for the model and take it; return False if another thread picked `place` out of the line.

        `AnswerTimeoutError` after the `deadline`, by `time.perf_counter`, and `CacheBlendError` if it `is_given_up`.
        """
        place = object() if place is None else place
        with self._changed:
            if not self.is_mine:
                self._queue.append(place)
                try:
                    while self._owner is not None or self._queue[0] is not place:
                        left_s = deadline - time.perf_counter()
                        if left_s <= 0:
                            raise AnswerTimeoutError(
                                "the model was busy with other calls for as long as this one may wait; "
                                "let it wait longer, or make fewer calls at once"
                            )
                        self._changed.wait(min(left_s, threading.TIMEOUT_MAX if is_given_up is None else GLANCE_S))
                        if place not in self._queue:
                            return False
                        if is_given_up is not None and is_given_up():
                            raise CacheBlendError("the answer was cancelled before it began; try again")
                    self._owner = threading.get_ident()
                finally:
                    self.pick(place)
            self._depth += 1
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

    def pick(self, place: object) -> bool:
        """Take out of the line what another thread waits with; return whether it was still there."""
        with self._changed:
            if place not in self._queue:
                return False
            self._queue.remove(place)
            self._changed.notify_all()
            return True


def deadline_of(wait_s: float | None) -> float:
    """Return until when a call waits for the model that may wait so many seconds from now, None for as long as it takes."""
    if wait_s is None:
        return math.inf
    if not (isinstance(wait_s, int | float) and wait_s >= 0):
        raise ConfigError(f"wait_s={wait_s!r} must be a number of seconds from 0 upwards; leave it out for no limit")
    return time.perf_counter() + wait_s


_schedulers: WeakKeyDictionary[PreTrainedModel, Scheduler] = WeakKeyDictionary()


def scheduler_of(model: PreTrainedModel) -> Scheduler:
    """Return a model's scheduler: one for all engines that are made on it, and on what PEFT or torch.compile put around it."""
    # One call, which threads cannot get between.
    found = _schedulers.setdefault(unwrapped(model), Scheduler())
    if found.process != os.getpid():
        # Of a process that this one was forked from, whose threads may have had the model.
        found = _schedulers[unwrapped(model)] = Scheduler()
    return found
