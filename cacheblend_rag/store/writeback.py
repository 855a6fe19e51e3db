"""Writing the KV of misses in the background, so that no answer waits for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from logging import getLogger

from cacheblend_rag.codec import PackedKV
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.base import NodeRecord
from cacheblend_rag.store.locks import ForkSafeLock

__all__ = ["WaitingChunk", "WriteBack"]

_log = getLogger(__name__)


@dataclass(eq=False, slots=True)
class WaitingChunk:
    """KV that waits to be written, and the names that lead to it.

    Attributes
    ----------
    key : str
        Its store key.
    kv : ChunkKV or PackedKV
        The KV.
    namespace, tenant : str
        Where its names are, and whose.
    records : list of NodeRecord
        Names nobody knew, to be recorded with it.
    known : list of str
        Names that led to it when it was computed.
    expires_at : float or None
        From when on it counts as a miss, by the store's time.
    is_copy : bool
        Whether it came from the remote tier, and need not go there again.
    cancelled : bool
        Whether it is not to be written any more. Set before the transaction that deletes begins, read in the one that writes:
        whichever comes second finds what the other did.
    """

    key: str
    kv: ChunkKV | PackedKV
    namespace: str
    tenant: str
    records: list[NodeRecord]
    known: list[str]
    expires_at: float | None
    is_copy: bool = False
    cancelled: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class WriteBack:
    """A bounded queue of KV and the thread that writes it, which ends when there is nothing left to write.

    What waits can be read, and its names are known, as if it were written. Being no daemon, the thread also keeps a process that
    ends in the usual way alive until all is written. A forked child does not write what its parent has waiting.

    Parameters
    ----------
    write : callable
        Writes one chunk.
    limit_bytes : int
        Most bytes of KV that may wait.
    """

    def __init__(self, write: Callable[[WaitingChunk], None], limit_bytes: int) -> None:
        self._write = write
        self.limit_bytes = limit_bytes
        self._lock = ForkSafeLock()
        self._queue: list[WaitingChunk] = []
        self._bytes = 0
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._error: StoreError | None = None
        self._refused = 0
        self._changes = 0

    def offer(self, chunk: WaitingChunk) -> bool:
        """Have a chunk written; return False, and count it, if the queue is full."""
        with self._lock:
            self._after_fork()
            if self._bytes + chunk.kv.nbytes > self.limit_bytes:
                self._refused += 1
                first = self._refused == 1
            else:
                first = False
                self._queue.append(chunk)
                self._bytes += chunk.kv.nbytes
                self._changes += len(chunk.records)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="cacheblend-write-back")
                    self._thread.start()
                return True
        if first:
            _log.warning(
                "KV of misses is computed faster than it is written, and what finds no room in write_back_bytes=%d is not stored "
                "(this is said once; the store's figures count it)",
                self.limit_bytes,
            )
        return False

    def find(self, key: str) -> WaitingChunk | None:
        """Return what waits under `key`, or None."""
        if not self._queue:
            return None
        with self._lock:
            self._after_fork()
            return next((chunk for chunk in self._queue if chunk.key == key and not chunk.cancelled), None)

    def get(self, key: str) -> ChunkKV | PackedKV | None:
        """Return KV that waits under `key`, or None."""
        chunk = self.find(key)
        return None if chunk is None else chunk.kv

    def records(self, namespace: str) -> dict[str, NodeRecord]:
        """Return the records that wait with their KV, by id."""
        if not self._queue:
            return {}
        with self._lock:
            self._after_fork()
            return {
                record.id: record
                for chunk in self._queue
                if chunk.namespace == namespace and not chunk.cancelled
                for record in chunk.records
            }

    def forget(self, namespace: str, ids: Sequence[str]) -> set[str]:
        """Remove names from what waits, and what loses its last one altogether; return the names that had not been recorded."""
        gone = set(ids)
        found = set()
        with self._lock:
            self._after_fork()
            for chunk in self._queue:
                if chunk.namespace == namespace and not chunk.cancelled:
                    found |= {record.id for record in chunk.records} & gone
                    # Replaced, not changed: the writing thread may be going through the old ones.
                    chunk.records = [record for record in chunk.records if record.id not in gone]
                    chunk.known = [node for node in chunk.known if node not in gone]
                    chunk.cancelled = not chunk.records and not chunk.known
            self._changes += len(found)
        return found

    def drop(self, key: str | None = None, tenant: str | None = None) -> None:
        """Give up what waits: under one key, of one tenant, or everything."""
        with self._lock:
            self._after_fork()
            for chunk in self._queue:
                if key in (None, chunk.key) and tenant in (None, chunk.tenant):
                    chunk.cancelled = True
                    self._changes += len(chunk.records)

    def settle(self) -> None:
        """Wait until what waits now is written, or has failed to be."""
        with self._lock:
            self._after_fork()
            waiting = list(self._queue)
        for chunk in waiting:
            chunk.done.wait()

    def flush(self) -> None:
        """Wait until what waits now is written, and raise the first error since the last time.

        Raises
        ------
        StoreError
            If something could not be written.
        """
        self.settle()
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def waiting(self) -> tuple[int, int]:
        """How many chunks wait, and the bytes of their KV."""
        with self._lock:
            self._after_fork()
            return len(self._queue), self._bytes

    @property
    def refused(self) -> int:
        """How many chunks found no room to wait in, and were not written."""
        return self._refused

    @property
    def changes(self) -> int:
        """A number that grows with every name that begins to wait, or is given up."""
        return self._changes

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                chunk = self._queue[0]
            error = None
            try:
                if not chunk.cancelled:
                    self._write(chunk)
            except Exception as caught:
                _log.warning("the KV of a miss was not stored: %s", caught)
                error = caught if isinstance(caught, StoreError) else StoreError(f"KV was not written: {caught!r}")
            with self._lock:
                self._queue.remove(chunk)
                self._bytes -= chunk.kv.nbytes
                self._error = self._error or error
            chunk.done.set()

    def _after_fork(self) -> None:
        """Leave to the parent what it has waiting; the lock is held."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._changes += 1
            self._queue, self._bytes, self._thread, self._error = [], 0, None, None
