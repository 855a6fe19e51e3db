"""A store without a folder: KV in RAM, names in memory."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_rag.codec import PackedKV, pack_kv
from cacheblend_rag.errors import StoreFullError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.base import KVReader
from cacheblend_rag.store.clock import StoreClock
from cacheblend_rag.store.database import Database
from cacheblend_rag.store.device import DeviceReader, DeviceTier
from cacheblend_rag.store.kvstore import Computed, KVStore, end_of
from cacheblend_rag.store.ram import RamReader, RamTier
from cacheblend_rag.store.remote.offsite import Offsite

__all__ = ["MemoryStore"]


class MemoryStore(KVStore):
    """A store in RAM, which ends with this object; what RAM drops, the device tier drops too."""

    def __init__(self, ram: RamTier, device: DeviceTier, clock: StoreClock, offsite: Offsite | None = None) -> None:
        super().__init__(Database(None), clock, ram, device, offsite)
        ram.on_drop = lambda key: device.drop([key])

    @property
    def is_private(self) -> bool:
        return self._offsite is None

    @property
    def evictions(self) -> int:
        return self._ram.evictions

    def open(self, key: str) -> KVReader | None:
        self._check(key)
        cached = self._ram.get(key)
        if cached is not None and cached.is_live(self._clock.now()):
            resident = self._device.get(key)
            if resident is not None:
                return DeviceReader(resident.kv)
            return self._promoting(key, RamReader(cached.kv))
        self._drop_copies([key])
        return self._open_remote(key)

    def _put(self, key: str, kv: ChunkKV, tenant: str, expires_at: float | None) -> None:
        held = self._ram.peek(key)
        if held is not None:
            tenant = held.tenant
            expires_at = (
                None if None in (held.expires_at, expires_at) else max(end_of(held.expires_at), end_of(expires_at))
            )
        if not self._ram.put(key, kv, tenant, expires_at):
            nbytes, limit_bytes = pack_kv(kv, self._ram.codec).nbytes, self._ram.limit_bytes
            raise StoreFullError(
                f"a chunk of {nbytes} bytes exceeds the store's budget of {limit_bytes} bytes (ram_bytes)"
                if nbytes > limit_bytes
                else f"pinned KV leaves no {nbytes} bytes of the store's budget of {limit_bytes} bytes (ram_bytes); unpin some, "
                "or raise the budget"
            )
        self._ram.pin(self._names.pinned([key]))

    def _put_later(self, chunk: Computed) -> bool:
        key = chunk.key
        if not self._ram.put(key, chunk.kv, chunk.tenant, chunk.expires_at) and not self._offsite:
            return True
        if not self._database.transact(chunk.name):
            self._ram.drop([key])
            return True
        self._ram.pin(self._names.pinned([key]))
        self._send(key, chunk.kv, chunk.expires_at)
        if self._offsite and self._names.leading_to(key) is None:
            # Deleted between the two.
            self._offsite.drop([key])
        return True

    def _hold(self, keys: Sequence[str], durable: bool) -> list[bool]:
        now = self._clock.now()
        cached = [self._ram.peek(key) for key in keys]
        return [each is not None and each.is_live(now) for each in cached]

    def _end(self, key: str) -> float | None:
        cached = self._ram.peek(key)
        return None if cached is None else end_of(cached.expires_at)

    def _bring_back(self, key: str, was_named: bool, kv: PackedKV) -> None:
        if not was_named or self._names.leading_to(key) is not None:
            self._ram.put(key, kv)
