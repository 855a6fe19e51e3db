"""A store without a folder: KV in RAM, names in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from cacheblend_rag.codec import PackedKV, pack_kv
from cacheblend_rag.errors import StoreFullError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.base import KVReader, StoreStats, latest
from cacheblend_rag.store.clock import StoreClock
from cacheblend_rag.store.database import Database
from cacheblend_rag.store.device import DeviceReader, DeviceTier
from cacheblend_rag.store.index import Index
from cacheblend_rag.store.kvstore import KVStore
from cacheblend_rag.store.names import name_computed
from cacheblend_rag.store.ram import RamReader, RamTier
from cacheblend_rag.store.remote.offsite import Offsite
from cacheblend_rag.store.waiting import Computed

__all__ = ["MemoryStore"]


class MemoryStore(KVStore):
    """A store in RAM, which ends with this object; what RAM drops, the device tier drops too."""

    def __init__(self, ram: RamTier, device: DeviceTier, clock: StoreClock, offsite: Offsite | None = None) -> None:
        super().__init__(Index(Database(None)), clock, ram, device, offsite)
        self.is_private = offsite is None
        self._evictions_seen = 0

    @property
    def evictions(self) -> int:
        return self._ram.evictions

    def open(self, key: str) -> KVReader | None:
        self._check(key)
        self._follow()
        now = self._clock.now()
        cached = self._ram.get(key, now)
        if cached is None:
            self._device.drop([key])
            return self._open_remote(key)
        resident = self._device.get(key, now)
        return self._promoting(key, RamReader(cached.kv)) if resident is None else DeviceReader(resident.kv)

    def stats(self, tenant: str | None = None) -> StoreStats:
        figures = super().stats(tenant)
        return replace(figures, entries=len(self._ram.keys(tenant)), pinned_bytes=self._ram.pinned_bytes())

    def _put(self, key: str, kv: ChunkKV, tenant: str, expires_at: float | None) -> None:
        held = self._ram.peek(key)
        if held is not None:
            tenant, expires_at = held.tenant, latest(held.expires_at, expires_at)
        if not self._hold_in_ram(key, kv, tenant, expires_at):
            nbytes, limit_bytes = pack_kv(kv, self._ram.codec).nbytes, self._ram.limit_bytes
            raise StoreFullError(
                f"a chunk of {nbytes} bytes exceeds the store's budget of {limit_bytes} bytes (ram_bytes)"
                if nbytes > limit_bytes
                else f"pinned KV leaves no {nbytes} bytes of the store's budget of {limit_bytes} bytes (ram_bytes); unpin some, "
                "or raise the budget"
            )
        self._ram.pin(self.names.pinned([key]))

    def _write(self, chunk: Computed) -> None:
        key = chunk.key
        if not self._hold_in_ram(key, chunk.kv, chunk.tenant, chunk.expires_at) and not self._offsite:
            return
        if not self._index.database.transact(partial(name_computed, chunk)):
            self._drop_copies([key])
            return
        self._ram.pin(self.names.pinned([key]))
        self._send(key, chunk.kv, chunk.expires_at)
        if self._offsite and self.names.leading_to(key) is None:
            # Deleted between the two.
            self._offsite.drop([key])

    def _hold_in_ram(self, key: str, kv: ChunkKV | PackedKV, tenant: str, expires_at: float | None) -> bool:
        self._device.drop([key])
        is_held = self._ram.put(key, kv, tenant, expires_at)
        self._follow()
        return is_held

    def _hold(self, keys: Sequence[str]) -> list[bool]:
        now = self._clock.now()
        cached = [self._ram.peek(key) for key in keys]
        return [each is not None and each.is_live(now) for each in cached]

    def _follow(self) -> None:
        evictions = self._ram.evictions
        if evictions != self._evictions_seen:
            self._evictions_seen = evictions
            self._device.drop(set(self._device.keys()).difference(self._ram.keys()))
