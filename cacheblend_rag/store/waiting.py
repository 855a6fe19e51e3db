"""KV that waits in memory for a thread to work on it: to be written, or uploaded."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from typing import Generic, TypeVar

from cacheblend_rag.codec import PackedKV
from cacheblend_rag.errors import StoreError, StoreFullError, StoreReadOnlyError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.base import NodeRecord
from cacheblend_rag.store.folder import is_out_of_room

__all__ = ["Computed", "WorkQueue", "WriteBack"]

_log = getLogger(__name__)

Item = TypeVar("Item")

# What could not be written is tried again with the next that comes after so long.
_RETRY_S = 2.0
# Failures that are no further apart than this are one event, which is said once: a full disk may have room in between.
_EVENT_S = 60.0


class WorkQueue(Generic[Item]):
    """A bounded queue and the thread that works on its items, one at a time in the order in which they come.

    A process that ends in the usual way works on everything first.

    Parameters
    ----------
    work : callable
        What is done with each item; it may not raise. An item for which it returns True stays, and can be tried again.
    limit_bytes : int
        Maximum bytes that may wait, what is being worked on included.
    thread_name : str
        What the thread is called.

    Attributes
    ----------
    entries : dict
        What waits, and what is being worked on, with its bytes and the work's future; changed under a lock alone.
    """

    def __init__(self, work: Callable[[Item], bool | None], limit_bytes: int, thread_name: str) -> None:
        self.limit_bytes = limit_bytes
        self._work = work
        self._thread_name = thread_name
        self._lock = threading.Lock()
        self.entries: dict[Item, tuple[int, Future[None]]] = {}
        self._bytes = 0
        self._executor = ThreadPoolExecutor(1, self._thread_name)

    def offer(self, item: Item, nbytes: int) -> bool:
        """Have an item worked on; return False if too much is waiting. For room, what stays goes first."""
        with self._lock:
            for old in self._staying():
                if self._bytes + nbytes > self.limit_bytes:
                    self._remove(old)
            if self._bytes + nbytes > self.limit_bytes:
                return False
            self.entries[item] = nbytes, self._executor.submit(self._run, item)
            self._bytes += nbytes
            return True

    def items(self) -> list[Item]:
        """Return what waits, and what is being worked on."""
        if not self.entries:
            return []
        with self._lock:
            return list(self.entries)

    def cancel(self, chosen: Callable[[Item], bool]) -> list[Future[None]]:
        """Take out the items that are chosen, except those being worked on, which are returned."""
        with self._lock:
            return self._cancel(chosen)

    def try_again(self) -> None:
        """Have what stays worked on again."""
        # After `close` nothing is.
        with self._lock, suppress(RuntimeError):
            for item in self._staying():
                self.entries[item] = self.entries[item][0], self._executor.submit(self._run, item)

    def settle(self) -> None:
        """Wait until everything that waits now is worked on."""
        with self._lock:
            waiting = [future for _, future in self.entries.values()]
        wait(waiting)

    def close(self) -> None:
        """Wait as `settle` does, and end the thread; nothing is offered any more."""
        self._executor.shutdown()

    def _run(self, item: Item) -> None:
        stays: bool | None = False
        try:
            stays = self._work(item)
        finally:
            if not stays:
                with self._lock:
                    self._remove(item)

    def _staying(self) -> list[Item]:
        return [item for item, (_, future) in self.entries.items() if future.done()]

    def _remove(self, item: Item) -> None:
        self._bytes -= self.entries.pop(item)[0]

    def _cancel(self, chosen: Callable[[Item], bool]) -> list[Future[None]]:
        running = []
        for item, (_, future) in [each for each in self.entries.items() if chosen(each[0])]:
            if future.cancel():
                self._remove(item)
            else:
                running.append(future)
        return running


@dataclass(eq=False, slots=True)
class Computed:
    """KV that was computed for an answer, the `records` of names nobody knew, and the names that were `known` to lead to it.

    What came from the remote tier is a copy, and need not go there again. `cancelled` is set before the transaction that deletes
    begins, and read in the one that writes: whichever comes second finds what the other did.
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


class WriteBack(WorkQueue[Computed]):
    """KV of misses that waits to be written to a folder. It can be read, and its names are known, as if it were written.

    What cannot be written, because the folder is full, locked, not writable or gone, stays, the oldest going first when there is
    no room: it is tried again with what comes later, by `flush`, and by `close`.

    Attributes
    ----------
    refused : Counter of str
        Chunks for which there was no room, by their tenants.
    changes : int
        A number that grows with every name that begins to wait, or is given up.
    """

    def __init__(self, write: Callable[[Computed], None], limit_bytes: int) -> None:
        self.refused: Counter[str] = Counter()
        self.changes = 0
        self._write = write
        self._error: StoreError | None = None
        # When writing failed last, if it has not succeeded since, and why what stays could not be written.
        self._failed_at: float | None = None
        self._failed_last_at = -math.inf
        self._stays_for: StoreError | None = None
        super().__init__(self._try_to_write, limit_bytes, "cacheblend-write-back")

    def put(self, chunk: Computed) -> bool:
        """Have a chunk written; return False, and count it, if the queue is full."""
        if self.offer(chunk, chunk.kv.nbytes):
            with self._lock:
                # Others may have gone for room.
                self.changes += 1 + len(chunk.records)
            return True
        with self._lock:
            self.refused[chunk.tenant] += 1
            is_first = self.refused.total() == 1
        if is_first:
            _log.warning(
                "KV of misses is computed faster than it is written, and what has no room in write_back_bytes=%d is not stored "
                "(this warning is not repeated; the store's figures count it)",
                self.limit_bytes,
            )
        return False

    def size(self, tenant: str | None = None) -> tuple[int, int]:
        """Return how many chunks wait, and their bytes, or those of one tenant."""
        with self._lock:
            waiting = [nbytes for chunk, (nbytes, _) in self.entries.items() if tenant in (None, chunk.tenant)]
        return len(waiting), sum(waiting)

    def find(self, key: str, now: float) -> Computed | None:
        """Return what waits under `key` and has not expired, or None."""
        for chunk in self.items():
            if chunk.key == key and not chunk.cancelled and (chunk.expires_at is None or chunk.expires_at > now):
                return chunk
        return None

    def records(self, namespace: str) -> dict[str, NodeRecord]:
        """Return the records that wait with their KV, by id."""
        if not self.entries:
            return {}
        chunks = [chunk for chunk in self.items() if chunk.namespace == namespace and not chunk.cancelled]
        return {record.id: record for chunk in chunks for record in chunk.records}

    def forget(self, namespace: str, ids: Sequence[str]) -> set[str]:
        """Remove names from what waits, and what loses its last one altogether; return the names that had not been recorded."""
        gone, found = set(ids), set()
        with self._lock:
            for chunk in self.entries:
                if chunk.namespace == namespace and not chunk.cancelled:
                    found |= {record.id for record in chunk.records} & gone
                    # Replaced, not changed: the writing thread may be going through the old ones.
                    chunk.records = [record for record in chunk.records if record.id not in gone]
                    chunk.known = [node for node in chunk.known if node not in gone]
                    chunk.cancelled = not chunk.records and not chunk.known
            self.changes += len(found)
            self._tidy()
        return found

    def drop(self, key: str | None = None, tenant: str | None = None) -> None:
        """Give up what waits: under one key, of one tenant, or everything."""
        with self._lock:
            for chunk in self.entries:
                if key in (None, chunk.key) and tenant in (None, chunk.tenant):
                    chunk.cancelled = True
                    self.changes += len(chunk.records)
            self._tidy()

    def flush(self) -> None:
        """Wait until everything is written or has failed to be; raise the first error since the last time, or why some stays.

        That a folder is read-only is no error: it was said when the first came to stay.
        """
        self.try_again()
        self.settle()
        with self._lock:
            error, self._error = self._error or (self._stays_for if self._staying() else None), None
        if error is not None and not isinstance(error, StoreReadOnlyError):
            raise error

    def close(self) -> None:
        self.try_again()
        super().close()
        with self._lock:
            lost = len(self._staying())
        # Of a read-only folder it was said when the first came to stay.
        if lost and not isinstance(self._stays_for, StoreReadOnlyError):
            _log.warning("the KV of %d misses was not stored and is lost: %s", lost, self._stays_for)

    def try_again(self) -> None:
        self._failed_at = None
        super().try_again()

    def _tidy(self) -> None:
        for chunk in self._staying():
            if chunk.cancelled:
                self._remove(chunk)

    def _try_to_write(self, chunk: Computed) -> bool:
        """Write a chunk; return whether it stays."""
        failed_at = self._failed_at
        if failed_at is not None and time.monotonic() - failed_at < _RETRY_S:
            return not chunk.cancelled
        try:
            if not chunk.cancelled:
                self._write(chunk)
        except Exception as caught:
            # A chunk larger than a budget never fits.
            stays = isinstance(caught, StoreError) and not (
                isinstance(caught, StoreFullError) and not is_out_of_room(caught)
            )
            now = time.monotonic()
            if now - self._failed_last_at > _EVENT_S or not stays:
                kept = "it is lost"
                if stays:
                    is_for_good = isinstance(caught, StoreReadOnlyError)
                    kept = "it is kept in memory" + (
                        ", for this process alone" if is_for_good else ", and written as soon as that can be done"
                    )
                _log.warning("the KV of a miss was not stored: %s; %s", caught, kept)
            error = caught if isinstance(caught, StoreError) else StoreError(f"KV was not written: {caught!r}")
            with self._lock:
                if stays:
                    self._failed_at = self._failed_last_at = now
                    self._stays_for = error
                else:
                    self._error = self._error or error
            return stays and not chunk.cancelled
        with self._lock:
            if not self._staying():
                self._stays_for = None
        if failed_at is not None:
            self.try_again()
        return False
