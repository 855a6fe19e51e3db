"""Chunks that are added in the background, by a thread of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future

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
    """Jobs of one engine, done one after the other by a thread that is there while there are any."""

    # No executor: its threads take no work once the interpreter ends, which waits here for what was asked for.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The job under way is the first; it leaves when it is done.
        self._queue: deque[tuple[AddJob, Work]] = deque()
        self._thread: threading.Thread | None = None
        self._failed: list[BaseException] = []
        self._closed = False
        self._giving_up = False

    def submit(self, job: AddJob, work: Work) -> AddJob:
        """Put a job at the end of the queue, and return it."""
        with self._lock:
            if self._closed:
                raise ConfigError("this engine is closed; make a new one")
            self._queue.append((job, work))
            self._start()
        return job

    def flush(self) -> None:
        """Wait for the jobs that were submitted before, and raise the first error since the last flush."""
        with self._lock:
            waiting = [job._future for job, _ in self._queue]
            self._start()
        futures.wait(waiting)
        failed = self._take_failed()
        _warn_of(failed[1:])
        if failed:
            raise failed[0]

    def close(self, wait: bool) -> None:
        """Take no more jobs and wait for those there are, or give them up after the batch under way."""
        with self._lock:
            self._closed = True
            self._giving_up = self._giving_up or not wait
            self._start()
            thread = self._thread
        if thread is not None:
            thread.join()
        _warn_of(self._take_failed())

    def _take_failed(self) -> list[BaseException]:
        with self._lock:
            failed, self._failed = self._failed, []
        return failed

    def _start(self) -> None:
        if self._queue and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="cacheblend-encoder")
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
            self._do(*self._queue[0])

    def _do(self, job: AddJob, work: Work) -> None:
        result: AddResult | None = None
        error: BaseException | None = None
        try:
            result = None if self._giving_up else work(lambda: self._giving_up)
            finished, total = job.progress
            if result is None or (self._giving_up and finished < total):
                error = ConfigError(
                    f"the engine was closed when {finished} of {total} chunks were encoded; the others are encoded when they "
                    "are retrieved"
                )
        except BaseException as failure:  # handed to who asks for the result
            error = failure
        with self._lock:
            self._queue.popleft()
            if error is not None:
                self._failed.append(error)
                job._future.set_exception(error)
            elif result is not None:
                job._future.set_result(result)


def _warn_of(failed: list[BaseException]) -> None:
    for error in failed:
        logger.warning("chunks added in the background were not stored: %s", error)
