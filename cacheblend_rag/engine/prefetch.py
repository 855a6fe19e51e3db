"""Bringing stored KV into faster tiers before a prompt needs it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

from cacheblend_rag.engine.answering import AnsweringStore
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.loader import compute_alone

__all__ = ["Prefetch", "Prefetcher"]

logger = logging.getLogger(__name__)


class Prefetch:
    """Reads that `BlendEngine.prefetch` has begun.

    Attributes
    ----------
    chunks : int
        How many chunks are known, each text once.
    """

    def __init__(self, reads: Sequence[Future[None]]) -> None:
        self._reads = reads
        self.chunks = len(reads)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to read, at most `timeout_s` seconds; return whether that is so.

        What a prompt has taken over, which reads it itself, is not left to read.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for read in self._reads:
            try:
                read.exception(None if until is None else max(until - time.monotonic(), 0))
            except futures.TimeoutError:
                return False
            except futures.CancelledError:
                pass
        return True


class Prefetcher:
    """Reads chunks in its own threads, so that RAM keeps them as far as it has room."""

    def __init__(self, store: AnsweringStore, threads: int) -> None:
        self._store = store
        self._lock = threading.Lock()
        # Its threads begin with the first read.
        self._pool = ThreadPoolExecutor(threads, "cacheblend-prefetch", initializer=compute_alone)
        # Reads that are not over, by their keys.
        self._reads: dict[str, Future[None]] = {}

    def begin(self, keys: Iterable[str]) -> Prefetch:
        """Read what is under these keys, in this order; what is being read already is not read twice."""
        begun = list[Future[None]]()
        with self._lock:
            for key in dict.fromkeys(keys):
                if key not in self._reads:
                    try:
                        self._reads[key] = self._pool.submit(self._work, key)
                    except RuntimeError:
                        # It was closed, or Python ends.
                        break
                begun.append(self._reads[key])
        return Prefetch(begun)

    def claim(self, keys: Iterable[str]) -> None:
        """Make way for a prompt with these keys: reads that have not begun are its own business, others are waited for."""
        if not self._reads:
            return
        with self._lock:
            claimed = {key: self._reads[key] for key in keys if key in self._reads}
            for key, read in claimed.items():
                if read.cancel():
                    del self._reads[key]
        Prefetch(list(claimed.values())).wait()

    def close(self) -> None:
        """Stop after what is being read."""
        self._pool.shutdown(cancel_futures=True)

    def _work(self, key: str) -> None:
        try:
            reader = self._store.open(key)
            if reader is not None and reader.tier != "ram":
                for number in range(reader.num_layers):
                    reader.layer(number)
                reader.finish()
        except CacheBlendError as error:
            # The prompt itself will meet it, and encode the chunk anew.
            logger.warning("a chunk could not be prefetched: %s", error)
        finally:
            with self._lock:
                self._reads.pop(key, None)
