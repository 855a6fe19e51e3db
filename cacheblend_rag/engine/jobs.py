"""Adding chunks in the background."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cacheblend_rag.engine.writer import BatchWriter
from cacheblend_rag.errors import ConfigError

__all__ = ["AddJob", "AddResult", "Jobs"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AddResult:
    """What `BlendEngine.add` did.

    Attributes
    ----------
    encoded : int
        Texts whose KV was computed.
    named : int
        Chunks that are new, or whose text is; more than were encoded where texts recur or their KV was there already.
    unchanged : int
        Chunks that were stored exactly so, and measured where that is wanted and there is anything to measure them behind.
    tokens : int
        Tokens encoded.
    """

    encoded: int
    named: int
    unchanged: int
    tokens: int


class AddJob:
    """What `BlendEngine.add` returns when it encodes in the background.

    Parameters
    ----------
    finished, total : int
        Chunks that are done already, and all of them.
    """

    def __init__(self, finished: int, total: int) -> None:
        self._progress = (finished, total)
        self._ended = threading.Event()
        self._result: AddResult | None = None
        self._error: BaseException | None = None

    @property
    def progress(self) -> tuple[int, int]:
        """How many chunks are finished, and how many there are."""
        return self._progress

    def done(self) -> bool:
        """Whether the work has ended, well or not."""
        return self._ended.is_set()

    def result(self, timeout_s: float | None = None) -> AddResult:
        """Wait for the end of the work.

        Parameters
        ----------
        timeout_s : float, optional
            Seconds to wait at most; by default as long as it takes.

        Returns
        -------
        AddResult
            What was done.

        Raises
        ------
        CacheBlendError
            What went wrong, a `StoreError` most likely; what was stored until then stays.
        TimeoutError
            If the work goes on after `timeout_s` seconds.
        """
        if not self._ended.wait(timeout_s):
            finished, total = self._progress
            raise TimeoutError(f"{finished} of {total} chunks are encoded after {timeout_s} s; wait longer")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def advance(self, count: int) -> None:
        """Note that so many more chunks are finished."""
        finished, total = self._progress
        self._progress = (finished + count, total)

    def wait(self) -> None:
        """Wait for the end of the work, whatever it is."""
        self._ended.wait()

    def end(self, result: AddResult | None, error: BaseException | None) -> None:
        """Note how the work ended."""
        self._result, self._error = result, error
        self._ended.set()


Work = Callable[[AddJob, BatchWriter, Callable[[], bool]], AddResult]
"""Does a job with a writer, asking between batches whether to give up."""


class Jobs:
    """Jobs of one engine, done one after the other by a thread that is there while there are any.

    The thread is no daemon: an interpreter that ends waits for what was asked for.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # The job under way is the first; it leaves when it is done.
        self._queue: deque[tuple[AddJob, Work]] = deque()
        self._thread: threading.Thread | None = None
        self._failed: list[BaseException] = []
        self._closed = False
        self._giving_up = False

    def submit(self, job: AddJob, work: Work) -> None:
        """Put a job at the end of the queue."""
        with self._changed:
            if self._closed:
                raise ConfigError("this engine is closed; make a new one")
            self._queue.append((job, work))
            self._start()

    def flush(self) -> None:
        """Wait for the jobs that were submitted before, and raise the first error since the last flush."""
        with self._changed:
            waiting = [job for job, _ in self._queue]
            self._start()
        for job in waiting:
            job.wait()
        with self._changed:
            failed, self._failed = self._failed, []
        for error in failed[1:]:
            logger.warning("chunks that were added in the background are not stored: %s", error)
        if failed:
            raise failed[0]

    def close(self, wait: bool) -> None:
        """Take no more jobs and wait for those there are, or give them up after the batch under way."""
        with self._changed:
            self._closed = True
            self._giving_up = self._giving_up or not wait
            if self._queue:
                self._start()
            self._changed.wait_for(lambda: self._thread is None or not self._thread.is_alive())
            failed, self._failed = self._failed, []
        for error in failed:
            logger.warning("chunks that were added in the background are not stored: %s", error)

    def _start(self) -> None:
        # In the child of a fork the parent's thread is gone, and the jobs are still here.
        if self._queue and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._work, name="cacheblend-encoder")
            self._thread.start()

    def _work(self) -> None:
        with BatchWriter() as writer:
            while True:
                with self._changed:
                    if not self._queue:
                        break
                    job, work = self._queue[0]
                self._do(job, work, writer)
                del job, work
        with self._changed:
            self._thread = None
            # A job may have come while the writer ended.
            self._start()
            self._changed.notify_all()

    def _do(self, job: AddJob, work: Work, writer: BatchWriter) -> None:
        result, failure = None, None
        try:
            if self._giving_up:
                raise _given_up(job)
            result = work(job, writer, lambda: self._giving_up)
            if self._giving_up and job.progress[0] < job.progress[1]:
                result, failure = None, _given_up(job)
        except BaseException as error:  # handed to who asks for the result
            failure = error
            try:
                writer.drain()
            except Exception as late:
                logger.warning("a batch that was computed before could not be stored either: %s", late)
        with self._changed:
            self._queue.popleft()
            if failure is not None:
                self._failed.append(failure)
            job.end(result, failure)


def _given_up(job: AddJob) -> ConfigError:
    finished, total = job.progress
    return ConfigError(
        f"the engine was closed when {finished} of {total} chunks were encoded; the others are encoded when they are retrieved"
    )
