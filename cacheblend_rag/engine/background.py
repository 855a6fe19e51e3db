"""Work in separate threads: chunks that are added in the background, and answers that readers wait for."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.report import AddResult

__all__ = ["AddJob", "Feed", "Jobs", "in_thread"]

logger = logging.getLogger(__name__)

_LOGGED_S = 5.0

Piece = TypeVar("Piece")
Outcome = TypeVar("Outcome")
T = TypeVar("T")


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


class Feed(Generic[Piece, Outcome]):
    """Pieces, and an outcome after the last of them, which is a value or an error."""

    def __init__(self) -> None:
        self._outcome: Future[Outcome] = Future()
        # Each piece comes with the future of the next one; after the last comes None.
        self._next: Future[tuple[Piece, Future[object]] | None] = Future()
        self._last = self._next

    def start(self, work: Callable[[], Outcome], name: str) -> None:
        """Run `work` in its own thread, which may put pieces; what it returns or raises is the outcome."""

        def run() -> None:
            try:
                self._outcome.set_result(work())
            except BaseException as error:  # handed to the readers
                self._outcome.set_exception(error)
            self._last.set_result(None)

        # No daemon: an interpreter that ends while this thread computes, or only lets go of its tensors, would abort.
        threading.Thread(target=run, name=name).start()

    def put(self, piece: Piece) -> None:
        """Hand over the next piece."""
        following: Future[object] = Future()
        self._last.set_result((piece, following))
        self._last = following  # type: ignore[assignment]

    def next(self) -> Piece | None:
        """Return the next piece, waiting for it; None when there are no more."""
        return self._open(self._next.result())

    async def anext(self) -> Piece | None:
        """Wait for the next piece on an event loop; see `next`."""
        return self._open(await _awaited(self._next))

    def outcome(self) -> Outcome:
        """Return the outcome, waiting for it, or raise the error that it is."""
        return self._outcome.result()

    async def aoutcome(self) -> Outcome:
        """Wait for the outcome on an event loop; see `outcome`."""
        return await _awaited(self._outcome)

    def _open(self, given: tuple[Piece, Future[object]] | None) -> Piece | None:
        if given is None:
            return None
        piece, self._next = given  # type: ignore[assignment]
        return piece


async def _awaited(future: Future[T]) -> T:
    # A reader that is cancelled leaves the work to the others.
    return await asyncio.shield(asyncio.wrap_future(future))


async def in_thread(work: Callable[..., T]) -> T:
    """Return what `work` returns, called in its own thread with an event as `stop`, which is set if the caller is cancelled."""
    stop = threading.Event()
    feed: Feed[None, T] = Feed()
    feed.start(lambda: work(stop=stop), "cacheblend-many")
    try:
        return await feed.aoutcome()
    finally:
        stop.set()
