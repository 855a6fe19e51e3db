"""Bringing stored KV nearer before a prompt asks for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.loader import compute_alone
from cacheblend_rag.store import KVStore
from cacheblend_rag.store.device import DeviceReader
from cacheblend_rag.store.locks import ForkSafeLock, tell_after_fork
from cacheblend_rag.store.ram import RamReader
from cacheblend_rag.store.rise import RisingReader

__all__ = ["Prefetch", "Prefetcher"]

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Read:
    """One chunk that is to be read.

    Attributes
    ----------
    key : str
        Under which its KV is stored.
    holders : int
        How many callers want it read.
    begun : bool
        Whether it is being read, or was.
    over : Event
        Set when it is read, or is not to be read any more.
    """

    key: str
    holders: int = 0
    begun: bool = False
    over: threading.Event = field(default_factory=threading.Event)


class Prefetch:
    """What `BlendEngine.prefetch` has begun.

    Parameters
    ----------
    prefetcher : Prefetcher
        Who reads.
    reads : sequence of _Read
        One for each chunk that is read.

    Attributes
    ----------
    reads : sequence of _Read
        Those of them that it has not let go.
    """

    def __init__(self, prefetcher: Prefetcher, reads: Sequence[_Read]) -> None:
        self._prefetcher = prefetcher
        self.reads = reads
        self._chunks = len(reads)

    @property
    def chunks(self) -> int:
        """How many chunks are known, each text once."""
        return self._chunks

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to read; return whether that is so.

        What was cancelled is not left to read, nor what a prompt has taken over, which reads it itself, nor, in a forked
        process, what its parent began.

        Parameters
        ----------
        timeout_s : float, optional
            Most seconds to wait; no limit by default.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        return all(read.over.wait(None if until is None else max(until - time.monotonic(), 0)) for read in self.reads)

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
        self._lock = ForkSafeLock()
        self._pool: ThreadPoolExecutor | None = None
        # What is not over, by its key.
        self._reads: dict[str, _Read] = {}
        self._closed = False
        tell_after_fork(self)

    def begin(self, keys: Iterable[str]) -> Prefetch:
        """Read what is under these keys, in this order; what is being read already is not read twice."""
        reads: list[_Read] = []
        new: list[_Read] = []
        with self._lock:
            if not self._closed:
                for key in dict.fromkeys(keys):
                    read = self._reads.get(key)
                    if read is None:
                        read = self._reads[key] = _Read(key)
                        new.append(read)
                    read.holders += 1
                    reads.append(read)
            if new and self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "cacheblend-prefetch", initializer=compute_alone)
            pool = self._pool
        # Not under the lock, since the pool takes locks of its own that a fork waits for, too.
        for read in new:
            assert pool is not None
            try:
                pool.submit(self._work, read)
            except RuntimeError:
                # The pool was closed meanwhile, by `close` or because Python ends.
                with self._lock:
                    self._end(read)
        return Prefetch(self, reads)

    def let_go(self, prefetch: Prefetch) -> None:
        """Read no further chunk of those that only this caller wants."""
        with self._lock:
            for read in prefetch.reads:
                read.holders -= 1
                if not read.begun and not read.holders:
                    self._end(read)
            prefetch.reads = [read for read in prefetch.reads if read.begun]

    def claim(self, keys: Iterable[str]) -> None:
        """Make way for a prompt with these keys: reads that have not begun are its own business, others are waited for."""
        if not self._reads:
            return
        with self._lock:
            claimed = [self._reads[key] for key in keys if key in self._reads]
            for read in claimed:
                if not read.begun:
                    self._end(read)
        for read in claimed:
            read.over.wait()

    def close(self) -> None:
        """Stop behind what is being read."""
        with self._lock:
            self._closed = True
            pool = self._pool
            for read in list(self._reads.values()):
                if not read.begun:
                    self._end(read)
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def after_fork(self) -> None:
        """Leave to the parent what it reads."""
        self._pool = None
        for read in self._reads.values():
            # A thread of the parent may have been at work on the event itself.
            read.over = threading.Event()
            read.over.set()
        self._reads = {}

    def _end(self, read: _Read) -> None:
        """Have nobody wait for a read any more; the lock is held."""
        if self._reads.get(read.key) is read:
            del self._reads[read.key]
        read.over.set()

    def _work(self, read: _Read) -> None:
        with self._lock:
            if read.over.is_set():
                return
            read.begun = True
        try:
            self._read(read.key)
        finally:
            with self._lock:
                self._end(read)

    def _read(self, key: str) -> None:
        try:
            reader = self._store.open(key)
            if isinstance(reader, RisingReader):
                for number in range(reader.num_layers):
                    reader.keep(number, reader.layer(number))
                reader.finish()
            elif reader is not None and not isinstance(reader, RamReader | DeviceReader):
                for number in range(reader.num_layers):
                    reader.layer(number)
        except CacheBlendError as error:
            # The prompt itself will meet it, and encode the chunk anew.
            logger.warning("a chunk could not be prefetched: %s", error)
