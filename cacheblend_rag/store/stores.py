"""The two kinds of store: one without a folder, and one over a folder on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from logging import getLogger

from cacheblend_rag.codec import PackedKV, pack_kv
from cacheblend_rag.errors import StoreError, StoreFullError, StoreReadOnlyError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.base import Fate, KVReader, StoreStats, TierProbe, count_of, latest
from cacheblend_rag.store.database import Database
from cacheblend_rag.store.device import DeviceReader, DeviceTier
from cacheblend_rag.store.disk import DiskTier, disk_probe
from cacheblend_rag.store.index import Index
from cacheblend_rag.store.kvstore import KVStore, Result
from cacheblend_rag.store.names import name_computed
from cacheblend_rag.store.ram import RamReader, RamTier
from cacheblend_rag.store.remote.offsite import Offsite
from cacheblend_rag.store.waiting import Computed

__all__ = ["FolderStore", "MemoryStore"]

_log = getLogger(__name__)


class MemoryStore(KVStore):
    """A store in RAM, which ends with this object; what RAM drops, the device tier drops too."""

    def __init__(
        self,
        ram: RamTier,
        device: DeviceTier,
        clock: Callable[[], float] = time.time,
        offsite: Offsite | None = None,
    ) -> None:
        super().__init__(Index(Database(None)), clock, ram, device, offsite)
        self.is_private = offsite is None
        self._evictions_seen = 0

    def evictions(self, tenant: str | None = None) -> int:
        return self._ram.evictions(tenant)

    def open(self, key: str) -> KVReader | None:
        self._check(key)
        now = self._clock()
        cached = self._ram.get(key, now)
        if cached is None:
            self._device.drop([key])
            return self._open_remote(key)
        reader = RamReader(cached.kv, cached.nbytes)
        if not self._device.limit_bytes:
            return reader
        self._follow()
        resident = self._device.get(key, now)
        return self._promoting(key, reader) if resident is None else DeviceReader(resident.kv)

    def stats(self, tenant: str | None = None) -> StoreStats:
        figures = super().stats(tenant)
        return replace(figures, entries=len(self._ram.keys(tenant)), pinned_bytes=self._ram.pinned_bytes(tenant))

    def _put(self, key: str, kv: ChunkKV, tenant: str, expires_at: float | None) -> None:
        held = self._ram.peek(key)
        if held is not None:
            tenant, expires_at = held.tenant, latest(held.expires_at, expires_at)
        if not self._hold_in_ram(key, kv, tenant, expires_at):
            nbytes, limit_bytes = pack_kv(kv, self._ram.codec).nbytes, self._ram.limit_bytes
            raise StoreFullError(
                f"a chunk of {nbytes} bytes exceeds the store's budget of {limit_bytes} bytes (ram_bytes)"
                if nbytes > limit_bytes
                else f"pinned KV leaves less than {nbytes} bytes of the store's budget of {limit_bytes} bytes (ram_bytes); "
                "unpin some, or raise the budget"
            )
        self._ram.pin(self._names.pinned([key]))

    def _write(self, chunk: Computed, wait: bool = True) -> None:
        key = chunk.key
        if not self._hold_in_ram(key, chunk.kv, chunk.tenant, chunk.expires_at) and not self._offsite:
            return
        if not self._index.database.transact(partial(name_computed, chunk), wait):
            self._drop_copies([key])
            return
        self._ram.pin(self._names.pinned([key]))
        self._send(key, chunk.kv, chunk.expires_at)
        if self._offsite and self._names.leading_to(key) is None:
            # Deleted between the two.
            self._offsite.drop([key])

    def _hold_in_ram(self, key: str, kv: ChunkKV | PackedKV, tenant: str, expires_at: float | None) -> bool:
        self._device.drop([key])
        is_held = self._ram.put(key, kv, tenant, expires_at)
        self._follow()
        return is_held

    def _hold(self, keys: Sequence[str]) -> list[bool]:
        now = self._clock()
        cached = [self._ram.peek(key) for key in keys]
        return [each is not None and each.is_live(now) for each in cached]

    def _fates(self, keys: Sequence[str]) -> dict[str, Fate]:
        return dict.fromkeys(self._ram.dropped_lately(keys), "evicted")

    def _follow(self) -> None:
        evictions = self._ram.evictions()
        if evictions != self._evictions_seen:
            self._evictions_seen = evictions
            self._device.drop(set(self._device.keys()).difference(self._ram.keys()))


class FolderStore(KVStore):
    """A store over a folder on disk, which any number of processes may have open.

    KV is dropped on disk first and in memory second, and what was put or read whole is checked against the index once it is in
    memory. So no deletion, by this process or another, leaves a copy. At most `write_back_bytes` of KV wait to be written; with 0
    `put_later` is as durable as `put`, and only what cannot be written waits, at most as much as RAM holds.
    """

    def __init__(
        self,
        disk: DiskTier,
        ram: RamTier,
        device: DeviceTier,
        offsite: Offsite | None = None,
        write_back_bytes: int = 0,
    ) -> None:
        waiting_bytes = write_back_bytes or ram.limit_bytes
        super().__init__(disk.index, disk.clock, ram, device, offsite, waiting_bytes)
        self._writes_at_once = not write_back_bytes and not disk.read_only
        self.path = None if disk.read_only else disk.folder.path
        self._limit_bytes = disk.limit_bytes
        self._disk = disk
        self._deletions_seen = self._index.deletions()

    def evictions(self, tenant: str | None = None) -> int:
        return count_of(self._disk.evicted, tenant)

    def probes(self) -> list[TierProbe]:
        return super().probes() + ([] if self._disk.read_only else [partial(disk_probe, self._disk)])

    def open(self, key: str) -> KVReader | None:
        self._check(key)
        self._follow()
        now = self._clock()
        waiting = self._waiting.find(key, now)
        if waiting is not None:
            return RamReader(waiting.kv)
        resident = self._device.get(key, now)
        if resident is not None:
            self._disk.touch(key)
            return DeviceReader(resident.kv)
        cached = self._ram.get(key, now)
        if cached is not None:
            self._disk.touch(key)
            return self._promoting(key, RamReader(cached.kv, cached.nbytes), cached.tenant, cached.expires_at)
        # What has expired in memory may have been given a longer life on disk.
        found = self._disk.find(key)
        if found is None:
            return self._open_remote(key)
        file, entry = found
        keep = partial(self._keep, key, tenant=entry.tenant, expires_at=entry.expires_at)
        return self._promoting(key, file, entry.tenant, entry.expires_at, keep)

    def _put(self, key: str, kv: ChunkKV, tenant: str, expires_at: float | None) -> None:
        # RAM gets what the disk gives back, so that an answer is the same before and after a restart.
        packed = pack_kv(kv, self._disk.codec)
        self._drop_copies(self._disk.put(key, packed, tenant, expires_at))
        self._keep(key, packed, tenant, expires_at)

    def _write(self, chunk: Computed, wait: bool = True) -> None:
        if self._disk.read_only:
            raise StoreReadOnlyError(f"store folder {self._disk.folder.path} is not writable; it can only be read")
        wanted = partial(name_computed, chunk)
        packed = pack_kv(chunk.kv, self._disk.codec)
        self._drop_copies(self._disk.put(chunk.key, packed, chunk.tenant, chunk.expires_at, wanted, wait))
        self._keep(chunk.key, packed, chunk.tenant, chunk.expires_at)
        if not chunk.is_copy and self._disk.holds([chunk.key])[0]:
            self._send(chunk.key, chunk.kv, chunk.expires_at)

    def _send(self, key: str, kv: ChunkKV | PackedKV, expires_at: float | None) -> None:
        super()._send(key, kv, expires_at)
        if self._offsite and expires_at is None and not self._disk.holds([key])[0]:
            # Deleted between the two.
            self._offsite.drop([key])

    def _hold(self, keys: Sequence[str]) -> list[bool]:
        return self._disk.holds(keys)

    def _fates(self, keys: Sequence[str]) -> dict[str, Fate]:
        # What has no name is kept in RAM alone.
        fates: dict[str, Fate] = dict.fromkeys(self._ram.dropped_lately(keys), "evicted")
        return fates | self._disk.fates(keys)

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
        seen, now = self._deletions_seen, self._index.deletions()
        if now == seen:
            return
        gone = self._index.deleted_since(seen)
        if gone is None:
            copies = [*self._ram.keys(), *self._device.keys()]
            there = self._index.holds(copies, self._clock())
            gone = [key for key, is_there in zip(copies, there, strict=True) if not is_there]
        self._drop_copies(gone)
        self._unpin_copies()
        self._deletions_seen = now

    def _discard(self, key: str, wait: bool) -> None:
        self._disk.discard(key, wait)

    def _with_room(self, write: Callable[[], Result], spared: Collection[str] = ()) -> Result:
        return self._disk.with_room(write, spared=spared)

    def _release_files(self) -> None:
        self._disk.close()
