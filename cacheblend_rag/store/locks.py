"""Turns at a store that processes share."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Turns"]

_POLL_S = 0.005


class Turns:
    """Any number of threads and processes fill a store; somebody who looks for what was left half done does so while nobody does.

    With a `path`, the system lets go for a process that is killed. Where the folder is not writable nobody's turn comes.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
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
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _enter(self, step: int) -> bool:
        with self._lock:
            is_free = self._filling >= 0 if step > 0 else self._filling == 0
            self._filling += step if is_free else 0
            return is_free
