"""Chunks that are added in the background, by a thread of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.report import AddResult

__all__ = ["AddJob", "Jobs"]

logger = logging.getLogger(__name__)

_LOGGED_S = 5.0


class AddJob:
    """Chunks that `BlendEngine.add` encodes in the background.

    Attributes
    ----------
    progress : tuple of int
        How many chunks are finished, and how many there are.
    """

    def __init__(self, finished: int, total: int, on_progress: Callable[[int, int], None] | None = None) -> None:
        self.progress = (finished, total)
        self._on_progress = on_progress
        self._started = self._logged = time.monotonic()
        self._future: Future[AddResult] = Future()

    def done(self) -> bool:
        """Whether the work has ended, well or not."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> AddResult:
        """Wait for the end of the work, at most `timeout_s` seconds, and return what was done.

        Raises
        ------
        CacheBlendError
            What went wrong, a `StoreError` most likely; what was stored until then stays.
        TimeoutError
            If the work goes on after `timeout_s` seconds.
        """
        futures.wait([self._future], timeout_s)
        if not self.done():
            finished, total = self.progress
            raise TimeoutError(f"{finished} of {total} chunks are encoded after {timeout_s} s; wait longer")
        return self._future.result()

    def advance(self, count: int) -> None:
        """Note that that many more chunks are finished."""
        if count:
            finished, total = self.progress
            self.progress = (finished + count, total)
            self.tell()

    def tell(self) -> None:
        """Call `on_progress`, and log how far it is if that was not done for five seconds."""
        if (now := time.monotonic()) - self._logged > _LOGGED_S:
            self._logged = now
            logger.info("%d of %d chunks encoded after %.0f s", *self.progress, now - self._started)
        if self._on_progress is not None:
            self._on_progress(*self.progress)


Work = Callable[[Callable[[], bool]], AddResult]
"""Does a job, asking between batches whether to give up."""


class Jobs:
    """Jobs of one engine, done one after the other by a thread of their own; an interpreter that ends waits for them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "cacheblend-encoder")
        self._lock = threading.Lock()
        # Those that are not done, or whose error is still to be told.
        self._jobs: list[AddJob] = []
        self._giving_up = False

    def submit(self, job: AddJob, work: Work) -> AddJob:
        """Put a job at the end of the queue, and return it."""
        with self._lock:
            self._jobs = [each for each in self._jobs if not each.done() or each._future.exception()]
            try:
                job._future = self._pool.submit(self._do, job, work)
            except RuntimeError:
                raise ConfigError("this engine is closed; make a new one") from None
            self._jobs.append(job)
        return job

    def flush(self) -> None:
        """Wait for the jobs that were submitted before, and raise the first error since the last flush."""
        failed = self._take_failed()
        _warn_of(failed[1:])
        if failed:
            raise failed[0]

    def close(self, wait: bool) -> None:
        """Take no more jobs and wait for those there are, or give them up after the batch under way."""
        self._giving_up = self._giving_up or not wait
        self._pool.shutdown()
        _warn_of(self._take_failed())

    def _take_failed(self) -> list[BaseException]:
        """Wait for the jobs there are, and return the errors of those that no other thread has told."""
        waiting = list(self._jobs)
        futures.wait([job._future for job in waiting])
        with self._lock:
            ended = [each for each in waiting if each in self._jobs]
            self._jobs = [each for each in self._jobs if each not in waiting]
        return [error for job in ended if (error := job._future.exception()) is not None]

    def _do(self, job: AddJob, work: Work) -> AddResult:
        result = None if self._giving_up else work(lambda: self._giving_up)
        finished, total = job.progress
        if result is None or (self._giving_up and finished < total):
            raise ConfigError(
                f"the engine was closed when {finished} of {total} chunks were encoded; the others are encoded when they "
                "are retrieved"
            )
        return result


def _warn_of(failed: list[BaseException]) -> None:
    for error in failed:
        logger.warning("chunks added in the background were not stored: %s", error)
