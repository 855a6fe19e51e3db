"""KV that waits in memory for a thread to work on it: to be written, or uploaded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from typing import Generic, TypeVar

from cacheblend_rag.codec import PackedKV
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.base import NodeRecord
from cacheblend_rag.store.locks import ForkSafeLock

__all__ = ["Computed", "WorkQueue", "WriteBack"]

_log = getLogger(__name__)

Item = TypeVar("Item")


class WorkQueue(Generic[Item]):
    """A bounded queue and the thread that works on its items, one at a time in the order in which they come.

    A process that ends in the usual way works on everything first. A forked child begins with an empty queue: its parent works on
    what waited before.

    Parameters
    ----------
    work : callable
        What is done with each item; it may not raise.
    limit_bytes : int
        Maximum bytes that may wait, what is being worked on included.
    thread_name : str
        What the thread is called.
    """

    def __init__(self, work: Callable[[Item], None], limit_bytes: int, thread_name: str) -> None:
        self.limit_bytes = limit_bytes
        self._work = work
        self._thread_name = thread_name
        self._lock = ForkSafeLock()
        self._begin()

    def offer(self, item: Item, nbytes: int) -> bool:
        """Have an item worked on; return False if too much is waiting."""
        with self._locked():
            if self._bytes + nbytes > self.limit_bytes:
                return False
            self._waiting[item] = nbytes, self._executor.submit(self._run, item)
            self._bytes += nbytes
            return True

    def items(self) -> list[Item]:
        """Return what waits, and what is being worked on."""
        if not self._waiting:
            return []
        with self._locked():
            return list(self._waiting)

    def cancel(self, chosen: Callable[[Item], bool]) -> list[Future[None]]:
        """Take out the items that are chosen, except those being worked on, which are returned."""
        with self._locked():
            return self._cancel(chosen)

    def settle(self) -> None:
        """Wait until everything that waits now is worked on."""
        with self._locked():
            waiting = [future for _, future in self._waiting.values()]
        wait(waiting)

    def close(self) -> None:
        """Wait as `settle` does, and end the thread; nothing is offered any more."""
        with self._locked():
            executor = self._executor
        executor.shutdown()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            if self._pid != os.getpid():
                self._begin()
            yield

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._waiting: dict[Item, tuple[int, Future[None]]] = {}
        self._bytes = 0
        self._executor = ThreadPoolExecutor(1, self._thread_name)

    def _run(self, item: Item) -> None:
        try:
            self._work(item)
        finally:
            with self._lock:
                self._bytes -= self._waiting.pop(item)[0]

    def _cancel(self, chosen: Callable[[Item], bool]) -> list[Future[None]]:
        running = []
        for item, (nbytes, future) in [each for each in self._waiting.items() if chosen(each[0])]:
            if future.cancel():
                del self._waiting[item]
                self._bytes -= nbytes
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
        super().__init__(self._try_to_write, limit_bytes, "cacheblend-write-back")

    def put(self, chunk: Computed) -> bool:
        """Have a chunk written; return False, and count it, if the queue is full."""
        if self.offer(chunk, chunk.kv.nbytes):
            with self._locked():
                self.changes += len(chunk.records)
            return True
        with self._locked():
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
        with self._locked():
            waiting = [nbytes for chunk, (nbytes, _) in self._waiting.items() if tenant in (None, chunk.tenant)]
        return len(waiting), sum(waiting)

    def find(self, key: str) -> Computed | None:
        """Return what waits under `key`, or None."""
        return next((chunk for chunk in self.items() if chunk.key == key and not chunk.cancelled), None)

    def records(self, namespace: str) -> dict[str, NodeRecord]:
        """Return the records that wait with their KV, by id."""
        chunks = [chunk for chunk in self.items() if chunk.namespace == namespace and not chunk.cancelled]
        return {record.id: record for chunk in chunks for record in chunk.records}

    def forget(self, namespace: str, ids: Sequence[str]) -> set[str]:
        """Remove names from what waits, and what loses its last one altogether; return the names that had not been recorded."""
        gone, found = set(ids), set()
        with self._locked():
            for chunk in self._waiting:
                if chunk.namespace == namespace and not chunk.cancelled:
                    found |= {record.id for record in chunk.records} & gone
                    # Replaced, not changed: the writing thread may be going through the old ones.
                    chunk.records = [record for record in chunk.records if record.id not in gone]
                    chunk.known = [node for node in chunk.known if node not in gone]
                    chunk.cancelled = not chunk.records and not chunk.known
            self.changes += len(found)
        return found

    def drop(self, key: str | None = None, tenant: str | None = None) -> None:
        """Give up what waits: under one key, of one tenant, or everything."""
        with self._locked():
            for chunk in self._waiting:
                if key in (None, chunk.key) and tenant in (None, chunk.tenant):
                    chunk.cancelled = True
                    self.changes += len(chunk.records)

    def flush(self) -> None:
        """Wait until everything is written or has failed to be, and raise the first error since the last time."""
        self.settle()
        with self._locked():
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _begin(self) -> None:
        super()._begin()
        self.changes += 1
        self._error = None

    def _try_to_write(self, chunk: Computed) -> None:
        try:
            if not chunk.cancelled:
                self._write(chunk)
        except Exception as caught:
            _log.warning("the KV of a miss was not stored: %s", caught)
            error = caught if isinstance(caught, StoreError) else StoreError(f"KV was not written: {caught!r}")
            with self._lock:
                self._error = self._error or error
