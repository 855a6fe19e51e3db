"""The lock that lets one computation at a time have a model."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from cacheblend_rag.errors import AnswerTimeoutError
from cacheblend_rag.model import unwrapped

__all__ = ["SchedulerLock", "scheduler_lock"]


class SchedulerLock:
    """A lock on the model that threads get in the order in which they came; a thread that has it may take it again.

    A loop that encodes batch after batch would take an ordinary lock again before any prompt that waits for it woke up. In a
    forked child it is free, unless the thread that forked has it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._depth = 0
        self._line: deque[object] = deque()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        self._take(None)

    @contextmanager
    def within(self, until: float | None) -> Iterator[None]:
        """Take the model, unless that cannot be had until then.

        Parameters
        ----------
        until : float or None
            When to give up, by `time.perf_counter`; None waits as long as it takes.

        Raises
        ------
        AnswerTimeoutError
            If others have the model, or are before this thread in the line, until then.
        """
        self._take(until)
        try:
            yield
        finally:
            self._leave()

    def _take(self, until: float | None) -> None:
        self._forget_parent()
        left = None if until is None else min(until - time.perf_counter(), threading.TIMEOUT_MAX)
        with self._changed:
            if self._owner != threading.get_ident():
                place = object()
                self._line.append(place)
                try:
                    if not self._changed.wait_for(lambda: self._owner is None and self._line[0] is place, left):
                        raise AnswerTimeoutError(
                            "other calls had the model for all of the time that this one was given, so it is given up; give it "
                            "more, or ask for less at a time"
                        )
                    self._owner = threading.get_ident()
                finally:
                    self._line.remove(place)
                    self._changed.notify_all()
            self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    @property
    def wanted(self) -> bool:
        """Whether a thread waits in line."""
        self._forget_parent()
        return bool(self._line)

    @contextmanager
    def after_others(self) -> Iterator[None]:
        """Take the model when nobody else waits for it."""
        self._forget_parent()
        with self._changed:
            if self._owner != threading.get_ident():
                self._changed.wait_for(lambda: self._owner is None and not self._line)
                self._owner = threading.get_ident()
            self._depth += 1
        try:
            yield
        finally:
            self._leave()

    def _forget_parent(self) -> None:
        """Free the lock in a forked child, unless the thread that forked has it: the parent's other threads are gone."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._line.clear()
        # In the child that is the thread that forked.
        if self._owner != threading.main_thread().ident:
            self._owner, self._depth = None, 0

    def _leave(self) -> None:
        self._forget_parent()
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._changed.notify_all()


_locks: WeakKeyDictionary[PreTrainedModel, SchedulerLock] = WeakKeyDictionary()


def scheduler_lock(model: PreTrainedModel) -> SchedulerLock:
    """Return the lock on a model: one for all engines that are made on it, and on what PEFT or torch.compile put around it."""
    # One call, which threads cannot get between.
    return _locks.setdefault(unwrapped(model), SchedulerLock())
