"""Bringing KV from disk or a remote tier into RAM before it is asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.store import KVStore

__all__ = ["Prefetcher"]

logger = logging.getLogger(__name__)

_IN_MEMORY = ("ram", "device")


class Prefetcher:
    """Reads stored KV in a thread of its own, so that the store keeps it in RAM.

    Parameters
    ----------
    store : KVStore
        The store.
    limit_bytes : int
        Most bytes that one call brings in: what is prefetched must not drive out what is in use.
    """

    def __init__(self, store: KVStore, limit_bytes: int) -> None:
        self._store = store
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None
        self._closed = False

    def fetch(self, keys: Sequence[str]) -> None:
        """Have the KV under some keys read in the background; nothing where the thread is still busy with the last ones."""
        if not keys or self._store.is_private:
            return
        with self._lock:
            if self._closed or (self._under_way is not None and not self._under_way.done()):
                return
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "cacheblend-prefetch")
            self._under_way = self._thread.submit(self._read, tuple(keys))

    def wait(self) -> None:
        """Wait until what was asked for is read."""
        with self._lock:
            waiting = self._under_way
        if waiting is not None:
            waiting.result()

    def close(self) -> None:
        """Read nothing more; what is being read ends first."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, keys: tuple[str, ...]) -> None:
        left = self._limit_bytes
        try:
            for key in keys:
                reader = self._store.open(key)
                if reader is None or reader.tier in _IN_MEMORY:
                    continue
                left -= reader.packed_bytes
                if left < 0:
                    return
                for layer in range(reader.num_layers):
                    if self._closed:
                        return
                    reader.layer(layer)
        except CacheBlendError as error:
            # What cannot be read is a miss when it is asked for.
            logger.info("nothing more is prefetched: %s", error)
