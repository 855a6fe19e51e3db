"""Bringing stored KV nearer before a prompt asks for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, TimeoutError, wait

from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.loader import compute_alone
from cacheblend_rag.store import KVStore
from cacheblend_rag.store.device import DeviceReader
from cacheblend_rag.store.ram import RamReader
from cacheblend_rag.store.rise import RisingReader

__all__ = ["Prefetch", "Prefetcher"]

logger = logging.getLogger(__name__)


class Prefetch:
    """What `BlendEngine.prefetch` has begun.

    Parameters
    ----------
    reads : sequence of Future
        One for each chunk that is read.
    """

    def __init__(self, reads: Sequence[Future[None]]) -> None:
        self._reads = reads

    @property
    def chunks(self) -> int:
        """How many chunks are known, each text once."""
        return len(self._reads)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to read; return whether that is so.

        Parameters
        ----------
        timeout_s : float, optional
            Most seconds to wait; no limit by default.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for read in self._reads:
            try:
                read.result(None if until is None else max(until - time.monotonic(), 0))
            except CancelledError:
                continue
            except TimeoutError:
                return False
        return True

    def cancel(self) -> None:
        """Read no further chunk."""
        for read in self._reads:
            read.cancel()


class Prefetcher:
    """Reads chunks in threads of its own, so that the tiers keep them where they are read fast.

    From disk and remote tiers KV comes to RAM, and to the device, as far as these have room.

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
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._reads: dict[str, Future[None]] = {}
        self._closed = False

    def begin(self, keys: Iterable[str]) -> Prefetch:
        """Read what is under these keys, in this order; what is being read already is not read twice."""
        reads = []
        with self._lock:
            for key in dict.fromkeys(keys):
                if self._closed:
                    break
                read = self._reads.get(key)
                if read is None or read.done():
                    if self._pool is None:
                        self._pool = ThreadPoolExecutor(self._threads, "cacheblend-prefetch", initializer=compute_alone)
                    read = self._reads[key] = self._pool.submit(self._read, key)
                reads.append(read)
        return Prefetch(reads)

    def claim(self, keys: Iterable[str]) -> None:
        """Make way for a prompt with these keys: reads that have not begun are its own business, others are waited for."""
        if not self._reads:
            return
        with self._lock:
            claimed = [self._reads[key] for key in keys if key in self._reads]
            begun = [read for read in claimed if not read.cancel()]
            self._reads = {key: read for key, read in self._reads.items() if not read.done()}
        wait(begun)

    def close(self) -> None:
        """Stop behind what is being read."""
        with self._lock:
            self._closed = True
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)

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
