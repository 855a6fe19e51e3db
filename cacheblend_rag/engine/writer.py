"""Storing one batch while the next is computed."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from types import TracebackType

__all__ = ["BatchWriter"]

logger = logging.getLogger(__name__)


class BatchWriter:
    """A thread that stores one batch while the next is computed; never more than one waits, and none is forgotten.

    Leaving the context waits for the last one.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy = False

    def __enter__(self) -> BatchWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.drain()
        except Exception as late:
            if error is None:
                raise
            logger.warning("a batch that was computed before could not be stored either: %s", late)
        finally:
            if self._thread is not None:
                self._tasks.put(None)
                self._thread.join()
                self._thread = None

    def submit(self, task: Callable[[], None]) -> None:
        """Have `task` run once the one before has ended, whose error is raised here."""
        self.drain()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="cacheblend-writer")
            self._thread.start()
        self._busy = True
        self._tasks.put(task)

    def drain(self) -> None:
        """Wait until the last task has ended, and raise its error."""
        if self._busy:
            error = self._outcomes.get()
            self._busy = False
            if error is not None:
                raise error

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except BaseException as error:  # handed to who computes the batches
                self._outcomes.put(error)
            else:
                self._outcomes.put(None)
            # Or the batch would stay in memory until the next one comes.
            del task
