"""A store over a folder: RAM and the device tier hold copies of what is on disk, and what waits to be written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from logging import getLogger

from cacheblend_rag.codec import PackedKV, pack_kv
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.base import KVReader, NameChanges, NamedTarget, NodeRecord, StoreStats, TierProbe
from cacheblend_rag.store.device import DeviceReader, DeviceTier
from cacheblend_rag.store.disk import DiskTier, disk_probe
from cacheblend_rag.store.index import Dropped
from cacheblend_rag.store.kvstore import Computed, KVStore, Result, end_of
from cacheblend_rag.store.locks import ForkSafeLock
from cacheblend_rag.store.ram import RamReader, RamTier
from cacheblend_rag.store.remote.offsite import Offsite

__all__ = ["FolderStore"]

_log = getLogger(__name__)


class FolderStore(KVStore):
    """A store over a folder on disk, which any number of processes may have open.

    KV is dropped on disk first and in memory second, and what was put or read whole is checked against the index once it is in
    memory. So no deletion, by this process or another, leaves a copy. At most `write_back_bytes` of KV wait to be written; with 0
    `put_later` is as durable as `put`.
    """

    is_private = False

    def __init__(
        self,
        disk: DiskTier,
        ram: RamTier,
        device: DeviceTier,
        offsite: Offsite | None = None,
        write_back_bytes: int = 0,
    ) -> None:
        super().__init__(disk.database, disk.clock, ram, device, offsite, disk.writer)
        self.path = None if disk.read_only else disk.folder.path
        self._disk = disk
        self._waiting = _WriteBack(self._write, write_back_bytes)
        self._deletions_seen = self._index.deletions()

    @property
    def evictions(self) -> int:
        return self._disk.evictions

    def probes(self) -> list[TierProbe]:
        return super().probes() + ([] if self._disk.read_only else [partial(disk_probe, self._disk)])

    def open(self, key: str) -> KVReader | None:
        self._check(key)
        self._follow()
        waiting = self._waiting.find(key)
        if waiting is not None:
            return RamReader(waiting.kv)
        resident = self._device.get(key)
        cached = None if resident else self._ram.get(key)
        copy = resident or cached
        if copy is not None and not copy.is_live(self._clock.now()):
            # On disk it may have been given a longer life.
            self._drop_copies([key])
            resident = cached = None
        if resident is not None or cached is not None:
            self._disk.touch(key)
        if resident is not None:
            return DeviceReader(resident.kv)
        if cached is not None:
            return self._promoting(key, RamReader(cached.kv), cached.tenant, cached.expires_at)
        found = self._disk.find(key)
        if found is None:
            return self._open_remote(key)
        file, entry = found
        keep = partial(self._keep, key, tenant=entry.tenant, expires_at=entry.expires_at)
        return self._promoting(key, file, entry.tenant, entry.expires_at, keep)

    def settle(self) -> None:
        self._waiting.settle()

    def flush(self) -> None:
        self._waiting.flush()
        super().flush()

    def discard(self, key: str) -> None:
        self._check()
        self._waiting.drop(key=key)
        self._disk.discard(key)
        super().discard(key)

    def targets(self, namespace: str, ids: Sequence[str]) -> list[NamedTarget | None]:
        waiting = self._waiting.records(namespace)
        found = super().targets(namespace, ids)
        return [
            target or (NamedTarget(waiting[node]) if node in waiting else None)
            for node, target in zip(ids, found, strict=True)
        ]

    def lookup(self, namespace: str, ids: Sequence[str]) -> list[NodeRecord | None]:
        # In this order: what stops waiting in between is found in the index.
        waiting = self._waiting.records(namespace)
        found = super().lookup(namespace, ids)
        return [record or waiting.get(node) for node, record in zip(ids, found, strict=True)] if waiting else found

    def names(self, namespace: str) -> list[str]:
        waiting = self._waiting.records(namespace)
        return list(dict.fromkeys([*super().names(namespace), *waiting]))

    def revision(self) -> int:
        return super().revision() + self._waiting.changes

    def changes(self, namespace: str, since: int | None = None) -> NameChanges:
        # What is written in between is then found twice rather than not at all.
        waiting = {node: record.text_hash for node, record in self._waiting.records(namespace).items()}
        return replace(super().changes(namespace, since), waiting=waiting)

    def clear(self, tenant: str | None = None) -> None:
        self._waiting.drop(tenant=tenant)
        super().clear(tenant)

    def stats(self, tenant: str | None = None) -> StoreStats:
        self._follow()
        entries, nbytes, _ = self._index.share(tenant)
        waiting, waiting_bytes = self._waiting.size
        return replace(
            super().stats(tenant),
            entries=entries,
            disk_bytes=nbytes,
            pinned_bytes=self._index.pinned_bytes(),
            waiting=waiting,
            waiting_bytes=waiting_bytes,
            unwritten=self._waiting.refused,
        )

    def _hold(self, keys: Sequence[str], durable: bool) -> list[bool]:
        waiting = [not durable and self._waiting.find(key) is not None for key in keys]
        return [waits or there for waits, there in zip(waiting, self._disk.holds(keys), strict=True)]

    def _end(self, key: str) -> float | None:
        held = self._waiting.find(key) or self._index.entry(key) or self._ram.peek(key)
        return None if held is None else end_of(held.expires_at)

    def _prolong(self, keys: Sequence[str], expires_at: float | None) -> None:
        self._index.prolong(keys, expires_at)
        super()._prolong(keys, expires_at)

    def _remove(self, namespace: str, ids: Sequence[str]) -> set[str]:
        waited = self._waiting.forget(namespace, ids)
        return waited | super()._remove(namespace, ids)

    def _pin(self, namespace: str, ids: Sequence[str], pinned: bool) -> list[str]:
        self.settle()
        return self._names.pin(namespace, ids, pinned, self._disk.limit_bytes)

    def _deleting(self, delete: Callable[[], Result]) -> Result:
        return self._disk.deleting(delete)

    def _drop(self, dropped: Dropped) -> None:
        super()._drop(dropped)
        self._disk.remove(dropped)

    def _release_files(self) -> None:
        self._disk.close()

    def _stays(self, key: str) -> bool:
        return super()._stays(key) or self._is_on_disk(key)

    def _is_on_disk(self, key: str) -> bool:
        """Return whether a copy of what is under `key` may be kept: a reader may come to its end when all is over."""
        try:
            return not self._closed and self._disk.holds([key])[0]
        except StoreError:
            return False

    def _keep(self, key: str, kv: ChunkKV | PackedKV, tenant: str, expires_at: float | None) -> None:
        """Keep in RAM what is on disk, which nobody sees before it is clear that it was not dropped there meanwhile."""
        if not self._ram.put(key, kv, tenant, expires_at, hidden=True):
            return
        if self._is_on_disk(key):
            try:
                self._ram.pin(self._names.pinned([key]))
                self._ram.reveal(key)
                return
            except StoreError:
                # Closed between the two.
                pass
        self._ram.drop([key])

    def _follow(self) -> None:
        """Drop the copies of what other processes have deleted from the folder."""
        seen, now = self._deletions_seen, self._index.deletions()
        if now == seen:
            return
        gone = self._index.deleted_since(seen)
        if gone is None:
            copies = [*self._ram.keys(), *self._device.keys()]
            there = self._index.holds(copies, self._clock.now())
            gone = [key for key, is_there in zip(copies, there, strict=True) if not is_there]
        self._drop_copies(gone)
        self._unpin_copies()
        self._deletions_seen = now

    def _put(self, key: str, kv: ChunkKV, tenant: str, expires_at: float | None) -> None:
        # Packed once where both tiers use one codec.
        packed = pack_kv(kv, self._ram.codec) if self._ram.codec == self._disk.codec else kv
        self._drop_copies(self._disk.put(key, packed, tenant, expires_at))
        self._keep(key, packed, tenant, expires_at)

    def _put_later(self, chunk: Computed) -> bool:
        if self._disk.read_only:
            # Says so by an error.
            self._disk.put(chunk.key, chunk.kv)
        if self._waiting.limit_bytes:
            return self._waiting.offer(chunk)
        self._write(chunk)
        return True

    def _write(self, chunk: Computed) -> None:
        """Write one chunk and its names, unless its last name is gone."""
        self._drop_copies(self._disk.put(chunk.key, chunk.kv, chunk.tenant, chunk.expires_at, chunk.name))
        self._keep(chunk.key, chunk.kv, chunk.tenant, chunk.expires_at)
        if not chunk.is_copy and self._disk.holds([chunk.key])[0]:
            self._send(chunk.key, chunk.kv, chunk.expires_at)

    def _send(self, key: str, kv: ChunkKV | PackedKV, expires_at: float | None) -> None:
        super()._send(key, kv, expires_at)
        if self._offsite and expires_at is None and not self._disk.holds([key])[0]:
            # Deleted between the two.
            self._offsite.drop([key])

    def _bring_back(self, key: str, was_named: bool, kv: PackedKV) -> None:
        named = self._names.leading_to(key)
        if named is None and was_named:
            return
        if named is None or not self._waiting.limit_bytes:
            self._ram.put(key, kv)
        elif not self._disk.read_only:
            namespace, tenant, ids = named
            self._waiting.offer(Computed(key, kv, namespace, tenant, [], ids, None, is_copy=True))


class _WriteBack:
    """A bounded queue of KV and the thread that writes it.

    What waits can be read, and its names are known, as if it were written. A process that ends in the usual way writes it all
    first. A forked child does not write what its parent has waiting.
    """

    def __init__(self, write: Callable[[Computed], None], limit_bytes: int) -> None:
        self._write = write
        self.limit_bytes = limit_bytes
        self.refused = 0
        self.changes = 0
        """A number that grows with every name that begins to wait, or is given up."""
        self._lock = ForkSafeLock()
        self._error: StoreError | None = None
        self._begin()

    def offer(self, chunk: Computed) -> bool:
        """Have a chunk written; return False, and count it, if the queue is full."""
        with self._lock:
            self._after_fork()
            is_taken = self._bytes + chunk.kv.nbytes <= self.limit_bytes
            if is_taken:
                self._queue[chunk] = self._executor.submit(self._work, chunk)
                self._bytes += chunk.kv.nbytes
                self.changes += len(chunk.records)
            else:
                self.refused += 1
        if not is_taken and self.refused == 1:
            _log.warning(
                "KV of misses is computed faster than it is written, and what finds no room in write_back_bytes=%d is not stored "
                "(this is said once; the store's figures count it)",
                self.limit_bytes,
            )
        return is_taken

    def find(self, key: str) -> Computed | None:
        """Return what waits under `key`, or None."""
        return next((chunk for chunk in self._chunks() if chunk.key == key), None)

    def records(self, namespace: str) -> dict[str, NodeRecord]:
        """Return the records that wait with their KV, by id."""
        chunks = [chunk for chunk in self._chunks() if chunk.namespace == namespace]
        return {record.id: record for chunk in chunks for record in chunk.records}

    def forget(self, namespace: str, ids: Sequence[str]) -> set[str]:
        """Remove names from what waits, and what loses its last one altogether; return the names that had not been recorded."""
        gone, found = set(ids), set()
        with self._lock:
            self._after_fork()
            for chunk in self._queue:
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
        with self._lock:
            self._after_fork()
            for chunk in self._queue:
                if key in (None, chunk.key) and tenant in (None, chunk.tenant):
                    chunk.cancelled = True
                    self.changes += len(chunk.records)

    def settle(self) -> None:
        """Wait until what waits now is written, or has failed to be."""
        with self._lock:
            self._after_fork()
            waiting = list(self._queue.values())
        wait(waiting)

    def flush(self) -> None:
        """Wait as `settle` does, and raise the first error since the last time."""
        self.settle()
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def size(self) -> tuple[int, int]:
        """How many chunks wait, and the bytes of their KV."""
        with self._lock:
            self._after_fork()
            return len(self._queue), self._bytes

    def _chunks(self) -> list[Computed]:
        if not self._queue:
            return []
        with self._lock:
            self._after_fork()
            return [chunk for chunk in self._queue if not chunk.cancelled]

    def _work(self, chunk: Computed) -> None:
        error = None
        try:
            if not chunk.cancelled:
                self._write(chunk)
        except Exception as caught:
            _log.warning("the KV of a miss was not stored: %s", caught)
            error = caught if isinstance(caught, StoreError) else StoreError(f"KV was not written: {caught!r}")
        with self._lock:
            del self._queue[chunk]
            self._bytes -= chunk.kv.nbytes
            self._error = self._error or error

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._queue: dict[Computed, Future[None]] = {}
        self._bytes = 0
        self._executor = ThreadPoolExecutor(1, "cacheblend-write-back")

    def _after_fork(self) -> None:
        """Leave to the parent what it has waiting; the lock is held."""
        if self._pid != os.getpid():
            self._begin()
            self.changes += 1
            self._error = None
