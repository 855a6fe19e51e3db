"""Bringing stored KV nearer before a prompt asks for it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.loader import compute_alone
from cacheblend_rag.store import KVStore

__all__ = ["Prefetch", "Prefetcher"]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Read:
    """One chunk that is read, or waits for that, and how many callers want it."""

    key: str
    future: Future[None]
    holders: int = 0


class Prefetch:
    """What `BlendEngine.prefetch` has begun.

    Parameters
    ----------
    prefetcher : Prefetcher
        Who reads.
    reads : list of _Read
        One for each chunk that is read.

    Attributes
    ----------
    reads : list of _Read
        Those of them that it has not let go.
    chunks : int
        How many chunks are known, each text once.
    """

    def __init__(self, prefetcher: Prefetcher, reads: list[_Read]) -> None:
        self._prefetcher = prefetcher
        self._pid = os.getpid()
        self.reads = reads
        self.chunks = len(reads)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to read; return whether that is so.

        What was cancelled is not left to read, nor what a prompt has taken over, which reads it itself, nor, in a forked
        process, what its parent began.

        Parameters
        ----------
        timeout_s : float, optional
            Most seconds to wait; no limit by default.
        """
        if self._pid != os.getpid():
            return True
        until = None if timeout_s is None else time.monotonic() + timeout_s
        return all(
            _wait(read.future, None if until is None else max(until - time.monotonic(), 0)) for read in self.reads
        )

    def cancel(self) -> None:
        """Read no further chunk, but for those that another caller wants as well."""
        self._prefetcher.let_go(self)


class Prefetcher:
    """Reads chunks in threads of its own, so that the tiers keep them where they are read fast.

    From disk and remote tiers KV comes to RAM, and to the device, as far as these have room. A forked child reads nothing that
    its parent has begun, and has threads of its own.

    Parameters
    ----------
    store : KVStore
        Where KV is kept.
    threads : int
        How many chunks are read at once.
    """

    def __init__(self, store: KVStore, threads: int) -> None:
        self._store = store
        self._threads = threads
        self._closed = False
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        # What is not over, by its key.
        self._reads: dict[str, _Read] = {}

    def begin(self, keys: Iterable[str]) -> Prefetch:
        """Read what is under these keys, in this order; what is being read already is not read twice."""
        if self._pid != os.getpid():
            self._begin_anew()
        reads: list[_Read] = []
        with self._lock:
            for key in [] if self._closed else dict.fromkeys(keys):
                read = self._reads.get(key)
                if read is None:
                    if self._pool is None:
                        self._pool = ThreadPoolExecutor(self._threads, "cacheblend-prefetch", initializer=compute_alone)
                    try:
                        read = _Read(key, self._pool.submit(self._work, key))
                    except RuntimeError:
                        # Python ends.
                        break
                    self._reads[key] = read
                read.holders += 1
                reads.append(read)
        return Prefetch(self, reads)

    def let_go(self, prefetch: Prefetch) -> None:
        """Read no further chunk of those that only this caller wants."""
        if self._pid != os.getpid():
            return
        with self._lock:
            for read in prefetch.reads:
                read.holders -= 1
                if not read.holders and read.future.cancel():
                    self._reads.pop(read.key, None)
            prefetch.reads = [read for read in prefetch.reads if read.future.running() or read.future.done()]

    def claim(self, keys: Iterable[str]) -> None:
        """Make way for a prompt with these keys: reads that have not begun are its own business, others are waited for."""
        if not self._reads or self._pid != os.getpid():
            return
        with self._lock:
            claimed = [self._reads[key] for key in keys if key in self._reads]
            for read in claimed:
                if read.future.cancel():
                    self._reads.pop(read.key, None)
        for read in claimed:
            _wait(read.future, None)

    def close(self) -> None:
        """Stop behind what is being read."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            pool, self._reads = self._pool, {}
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def _work(self, key: str) -> None:
        try:
            self._read(key)
        except CacheBlendError as error:
            # The prompt itself will meet it, and encode the chunk anew.
            logger.warning("a chunk could not be prefetched: %s", error)
        finally:
            with self._lock:
                self._reads.pop(key, None)

    def _read(self, key: str) -> None:
        reader = self._store.open(key)
        if reader is None or (reader.tier in ("ram", "device") and not reader.promotes_to_device):
            return
        for number in range(reader.num_layers):
            reader.keep(number, reader.layer(number))
        reader.finish()


def _wait(future: Future[None], timeout_s: float | None) -> bool:
    """Wait until a read has ended or was cancelled; return whether that is so."""
    try:
        future.exception(timeout_s)
    except futures.CancelledError:
        return True
    except futures.TimeoutError:
        return False
    return True
