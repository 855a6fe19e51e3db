"""Adding chunks in the background, and storing one batch while the next is computed."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType

from cacheblend_rag.errors import ConfigError

__all__ = ["AddJob", "AddResult", "BatchWriter", "Jobs"]

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
        Chunks that were stored exactly so.
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
        self._future: Future[AddResult] = Future()

    @property
    def progress(self) -> tuple[int, int]:
        """How many chunks are finished, and how many there are."""
        return self._progress

    def done(self) -> bool:
        """Whether the work has ended, well or not."""
        return self._future.done()

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
        self.wait(timeout_s)
        if not self.done():
            finished, total = self._progress
            raise TimeoutError(f"{finished} of {total} chunks are encoded after {timeout_s} s; wait longer")
        return self._future.result()

    def advance(self, count: int) -> None:
        """Note that so many more chunks are finished."""
        finished, total = self._progress
        self._progress = (finished + count, total)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the work, whatever it is."""
        futures.wait([self._future], timeout_s)

    def end(self, result: AddResult | None, error: BaseException | None) -> None:
        """Note how the work ended."""
        if error is not None:
            self._future.set_exception(error)
        else:
            assert result is not None
            self._future.set_result(result)

    def given_up(self) -> ConfigError:
        """Return the error of a job whose engine was closed before its end."""
        finished, total = self._progress
        return ConfigError(
            f"the engine was closed when {finished} of {total} chunks were encoded; the others are encoded when they are "
            "retrieved"
        )


Work = Callable[[AddJob, Callable[[], bool]], AddResult]
"""Does a job, asking between batches whether to give up."""


class Jobs:
    """Jobs of one engine, done one after the other by a thread that is there while there are any.

    An executor would not do: its threads take no work once the interpreter ends, which waits here for what was asked for, and
    are gone in the child of a fork, where the jobs go on.
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
        failed = self._take_failed()
        _tell(failed[1:])
        if failed:
            raise failed[0]

    def close(self, wait: bool) -> None:
        """Take no more jobs and wait for those there are, or give them up after the batch under way."""
        with self._changed:
            self._closed = True
            self._giving_up = self._giving_up or not wait
            self._start()
            self._changed.wait_for(lambda: self._thread is None or not self._thread.is_alive())
        _tell(self._take_failed())

    def _take_failed(self) -> list[BaseException]:
        with self._changed:
            failed, self._failed = self._failed, []
        return failed

    def _start(self) -> None:
        if self._queue and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._work, name="cacheblend-encoder")
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._thread = None
                    self._changed.notify_all()
                    return
                job, work = self._queue[0]
            self._do(job, work)
            del job, work

    def _do(self, job: AddJob, work: Work) -> None:
        result, failure = None, None
        try:
            if self._giving_up:
                raise job.given_up()
            result = work(job, lambda: self._giving_up)
            if self._giving_up and job.progress[0] < job.progress[1]:
                raise job.given_up()
        except BaseException as error:  # handed to who asks for the result
            failure = error
        with self._changed:
            self._queue.popleft()
            if failure is not None:
                self._failed.append(failure)
            job.end(result, failure)


def _tell(failed: list[BaseException]) -> None:
    for error in failed:
        logger.warning("chunks that were added in the background are not stored: %s", error)


class BatchWriter:
    """Stores one batch, in a thread, while the next is computed; never more than one waits, and none is forgotten.

    Leaving the context waits for the last one.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

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

    def submit(self, task: Callable[[], None]) -> None:
        """Have `task` run once the one before has ended, whose error is raised here."""
        self.drain()

        def work() -> None:
            try:
                task()
            except BaseException as error:  # handed to who computes the batches
                self._error = error

        self._thread = threading.Thread(target=work, name="cacheblend-writer")
        self._thread.start()

    def drain(self) -> None:
        """Wait until the last task has ended, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            # Or the batch would stay in memory until the next one comes.
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
