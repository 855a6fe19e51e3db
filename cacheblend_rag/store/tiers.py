"""The tiers of a store: KV on a device, in RAM and on disk, and copies that move up."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from cacheblend_rag.codec import PackedKV, PackedLayer, pack_kv, repack_layer, unpack_layer
from cacheblend_rag.errors import ChunkReadError, StoreError, StoreFullError, StoreReadOnlyError
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store.base import Fate, KVReader, StoreStats, TierProbe, count_of, latest
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.disk import DiskTier, disk_probe
from cacheblend_rag.store.index import Index
from cacheblend_rag.store.memory import (
    DeviceReader,
    DeviceTier,
    LRUCache,
    RamReader,
    RamTier,
    ResidentKV,
    Upload,
    device_probe,
    ram_probe,
)

__all__ = ["PromotingReader", "Tiers"]

_log = getLogger(__name__)

Layer = TypeVar("Layer")
Result = TypeVar("Result")


class Tiers:
    """KV on this machine: on disk, with copies in RAM and on devices; without a disk RAM has all of it.

    KV is dropped on disk first and in memory second, and what enters memory is checked against the disk once it is there, so that
    no deletion, by any process, leaves a copy. Nothing is on a device that is not in a slower tier too. KV expires
    by `clock`, in seconds.
    """

    def __init__(
        self, index: Index, clock: Callable[[], float], device: DeviceTier, ram: RamTier, disk: DiskTier | None = None
    ) -> None:
        self.index, self.clock = index, clock
        self.device, self.ram, self.disk = device, ram, disk
        self._closed = False
        # What the copies were last compared with: evictions from RAM, or deletions from the index.
        self._seen = 0 if disk is None else index.deletions()
        self.pin()

    @property
    def path(self) -> Path | None:
        """The folder, if there is one and it may be written."""
        return None if self.disk is None or self.disk.read_only else self.disk.folder.path

    def evictions(self, tenant: str | None = None) -> int:
        """Return how many entries were dropped for room, of one tenant or all."""
        return self.ram.evictions(tenant) if self.disk is None else count_of(self.disk.evicted, tenant)

    def stats(self, tenant: str | None) -> StoreStats:
        """Return the figures of what is held, by one tenant or all."""
        entries, nbytes, names = self.index.share(tenant)
        pinned_bytes = self.index.pinned_bytes(tenant)
        if self.disk is None:
            entries, pinned_bytes = len(self.ram.keys(tenant)), self.ram.pinned_bytes(tenant)
        return StoreStats(
            nodes=names,
            entries=entries,
            ram_bytes=self.ram.nbytes(tenant),
            disk_bytes=nbytes,
            evictions=self.evictions(tenant),
            pinned_bytes=pinned_bytes,
            device_bytes=self.device.nbytes(tenant),
            ram_evictions=self.ram.evictions(tenant),
            device_evictions=self.device.evictions(tenant),
        )

    def get(self, key: str) -> KVReader | None:
        """Return a reader of the KV under `key` and mark it as recently used, or None if it is not held."""
        now = self.clock()
        # In RAM it is marked as used even where the device has it: what RAM drops, the device drops too.
        cached, resident = self.ram.get(key, now), self.device.get(key, now)
        if self.disk is not None and (cached or resident):
            self.disk.touch(key)
        if resident is not None and (cached or self.disk):
            return DeviceReader(resident.kv)
        if cached is not None:
            reader = RamReader(cached.kv, cached.nbytes)
            if not self.device.limit_bytes:
                return reader
            return self.promoting(key, reader, cached.tenant, cached.expires_at)
        # What has expired in memory may have been given a longer life on disk.
        found = None if self.disk is None else self.disk.find(key)
        if found is None:
            return None
        file, entry = found
        keep = partial(self._keep, key, tenant=entry.tenant, expires_at=entry.expires_at)
        return self.promoting(key, file, entry.tenant, entry.expires_at, keep)

    def put(
        self,
        key: str,
        kv: ChunkKV | PackedKV,
        tenant: str,
        expires_at: float | None,
        wanted: Callable[[sqlite3.Connection], bool] | None = None,
        wait: bool = True,
    ) -> None:
        """Keep KV, unless `wanted`, called in a transaction, returns False; `StoreFullError` where there is no room."""
        if self.disk is not None:
            if self.disk.read_only:
                raise StoreReadOnlyError(f"store folder {self.disk.folder.path} is not writable; it can only be read")
            # RAM gets what the disk gives back, so that an answer is the same before and after a restart.
            packed = pack_kv(kv, self.disk.codec)
            self.drop(self.disk.put(key, packed, tenant, expires_at, wanted, wait))
            if wanted is None or self.disk.holds([key])[0]:
                self._keep(key, packed, tenant, expires_at)
            return
        held = self.ram.peek(key)
        if held is not None:
            tenant, expires_at = held.tenant, latest(held.expires_at, expires_at)
        self.device.drop([key])
        has_room = self.ram.put(key, kv, tenant, expires_at)
        if wanted is not None and not self.index.database.transact(wanted, wait):
            self.drop([key])
        self.follow()
        if not has_room:
            nbytes, limit_bytes = pack_kv(kv, self.ram.codec).nbytes, self.ram.limit_bytes
            raise StoreFullError(
                f"a chunk of {nbytes} bytes exceeds the store's budget of {limit_bytes} bytes (ram_bytes)"
                if nbytes > limit_bytes
                else f"pinned KV leaves less than {nbytes} bytes of the store's budget of {limit_bytes} bytes (ram_bytes); "
                "unpin some, or raise the budget"
            )

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its KV is held, and not only a copy of what is gone."""
        if self.disk is not None:
            return self.disk.holds(keys)
        now = self.clock()
        return [(cached := self.ram.peek(key)) is not None and cached.is_live(now) for key in keys]

    def drop(self, keys: Iterable[str]) -> None:
        """Drop copies of what is not on disk any more."""
        keys = list(keys)
        # In this order: what rises to the device meanwhile looks into RAM once it is there.
        self.ram.drop(keys)
        self.device.drop(keys)

    def discard(self, key: str, wait: bool) -> None:
        """Drop what is under `key`, on disk too."""
        try:
            if self.disk is not None:
                self.disk.discard(key, wait)
        finally:
            self.drop([key])

    def fates(self, keys: Sequence[str]) -> dict[str, Fate]:
        """Return how those of the keys lost their KV of which that is known."""
        # What has no name is kept in RAM alone.
        fates: dict[str, Fate] = dict.fromkeys(self.ram.dropped_lately(keys), "evicted")
        return fates if self.disk is None else fates | self.disk.fates(keys)

    def prolong(self, keys: Sequence[str], expires_at: float | None) -> None:
        """Let KV that is held live until then at least."""
        now = self.clock()
        self.with_room(lambda: self.index.prolong(keys, expires_at, now))
        for key in keys:
            self.ram.prolong(key, expires_at, now)
            self.device.prolong(key, expires_at, now)

    def follow(self) -> None:
        """Drop the copies of what slower tiers have dropped."""
        if self.disk is None and not self.device.limit_bytes:
            return
        seen, now = self._seen, self.ram.evictions() if self.disk is None else self.index.deletions()
        if now == seen:
            return
        if self.disk is None:
            self.device.drop(set(self.device.keys()).difference(self.ram.keys()))
        else:
            gone = self.index.deleted_since(seen)
            if gone is None:
                copies = [*self.ram.keys(), *self.device.keys()]
                there = self.index.holds(copies, self.clock())
                gone = [key for key, is_there in zip(copies, there, strict=True) if not is_there]
            self.drop(gone)
            self.pin()
        self._seen = now

    def pin(self) -> None:
        """Never drop from RAM for room what pinned names lead to."""
        self.ram.pin(self.index.pinned())

    def with_room(self, write: Callable[[], Result], spared: Collection[str] = ()) -> Result:
        """Return what `write` returns, where the disk is full once there is room; none of the `spared` keys goes for that."""
        return write() if self.disk is None else self.disk.with_room(write, spared=spared)

    def clear(self, tenant: str | None) -> None:
        """Drop all that is in memory, or what one tenant has there."""
        if tenant is None:
            self.ram.clear()
            self.device.clear()
        else:
            self.drop([*self.ram.keys(tenant), *self.device.keys(tenant)])

    def probes(self) -> list[TierProbe]:
        """Return what puts chunks into each tier only to measure how fast they are read."""
        probes: list[TierProbe] = [partial(device_probe, self.device)] if self.device.limit_bytes else []
        probes.append(partial(ram_probe, self.ram.codec))
        return probes if self.disk is None or self.disk.read_only else [*probes, partial(disk_probe, self.disk)]

    def close(self) -> None:
        """Drop what is in memory, and release files."""
        self._closed = True
        self.clear(None)
        if self.disk is None:
            self.index.database.close()
        else:
            self.disk.close()

    def promoting(
        self,
        key: str,
        source: ChunkFile | RamReader,
        tenant: str = "",
        expires_at: float | None = None,
        to_ram: Callable[[PackedKV], None] | None = None,
    ) -> KVReader:
        """Return a reader of what is under a key that brings it into faster tiers where it fits."""
        rises = self.device.limit_bytes > 0 and source.kv_bytes <= self.device.limit_bytes
        if to_ram is None and not rises:
            return source
        return PromotingReader(
            source,
            ram=self.ram if to_ram else None,
            to_ram=to_ram,
            device=self.device if rises else None,
            to_device=partial(self._keep_on_device, key, tenant, expires_at),
        )

    def _keep(self, key: str, kv: PackedKV, tenant: str, expires_at: float | None) -> None:
        """Keep in RAM what is on disk, unless it was dropped there meanwhile."""
        if self.ram.put(key, kv, tenant, expires_at):
            self._check_copy(key)

    def _keep_on_device(self, key: str, tenant: str, expires_at: float | None, kv: ResidentKV) -> None:
        """Keep a copy on its device, unless slower tiers have dropped it meanwhile."""
        if cached := self.ram.peek(key):
            # Its life may have been prolonged since.
            tenant, expires_at = cached.tenant, cached.expires_at
        if self.device.keep(key, kv, tenant, expires_at):
            self._check_copy(key)

    def _check_copy(self, key: str) -> None:
        """Drop what has just been copied to memory if slower tiers do not hold it any more, or the store is closed."""
        try:
            if not self._closed and (self.disk.holds([key])[0] if self.disk else self.ram.peek(key) is not None):
                return
        except StoreError:
            # Closed between the two.
            pass
        self.drop([key])


class _Promotion(Generic[Layer]):
    """The layers of one chunk that were read so far, and the room that a faster tier keeps for all of them."""

    def __init__(self, tier: LRUCache[Any], nbytes: int, num_layers: int) -> None:
        self._tier = tier
        self._nbytes = nbytes
        self._num_layers = num_layers
        self._lock = threading.Lock()
        self._began = False
        self._layers: dict[int, Layer] | None = None

    def __del__(self) -> None:
        # Takes no lock, being a finalizer.
        if self._layers is not None:
            self._tier.give_back(self._nbytes)

    def begin(self) -> bool:
        """Reserve room, the first time; return whether there was any and the chunk is still on its way."""
        with self._lock:
            if not self._began:
                self._began = True
                if self._tier.reserve(self._nbytes):
                    self._layers = {}
            return self._layers is not None

    def get(self, index: int) -> Layer | None:
        with self._lock:
            return None if self._layers is None else self._layers.get(index)

    def add(self, index: int, layer: Layer) -> None:
        with self._lock:
            if self._layers is not None:
                self._layers[index] = layer

    def end(self) -> dict[int, Layer] | None:
        """Give the room back, if that is still to be done, and return what came of the chunk."""
        with self._lock:
            layers, self._layers = self._layers, None
        if layers is not None:
            self._tier.give_back(self._nbytes)
        return layers

    def complete(self, read: Callable[[int], Layer]) -> Sequence[Layer] | None:
        """Return all layers, or None if most are wanting; the few that were not asked for, their KV being computed, are read."""
        layers = self.end()
        missing = [number for number in range(self._num_layers) if number not in (layers or {})]
        if layers is None or len(missing) * 2 > self._num_layers:
            return None
        try:
            layers.update([(number, read(number)) for number in missing])
        except ChunkReadError as error:
            _log.warning("%s", error)
            return None
        return [layers[number] for number in range(self._num_layers)]


class PromotingReader(KVReader):
    """Reads a file or KV in RAM, and hands what it has read to RAM and to the device tier in `finish`.

    RAM keeps room for it from the beginning on, the device tier from the first layer that is kept: by then all chunks of a
    prompt are opened, and none that it needs has to be read because it had to go.
    """

    def __init__(
        self,
        source: ChunkFile | RamReader,
        *,
        ram: RamTier | None = None,
        to_ram: Callable[[PackedKV], None] | None = None,
        device: DeviceTier | None = None,
        to_device: Callable[[ResidentKV], None] | None = None,
    ) -> None:
        super().__init__(
            source.token_ids, source.start, source.context, source.num_layers, source.codec, source.packed_bytes
        )
        self.tier = source.tier
        self.promotes_to_device = device is not None
        self._source = source
        self._ram, self._to_ram = ram, to_ram
        self._device, self._to_device = device, to_device
        self._packed: _Promotion[PackedLayer] | None = None
        if ram is not None:
            # Packing never makes KV larger, unpacking may.
            nbytes = source.kv_bytes if ram.codec.name == "native" else source.packed_bytes
            self._packed = _Promotion(ram, nbytes, self.num_layers)
            self._packed.begin()
        self._uploads: _Promotion[Upload] | None = None
        if device is not None:
            self._uploads = _Promotion(device, source.kv_bytes, self.num_layers)

    def layer(self, index: int) -> LayerKV:
        """Return one layer, read once where it goes to RAM; the caller must not write to it."""
        if self._packed is None or self._ram is None or not self._packed.begin():
            return self._source.layer(index)
        packed = self._packed.get(index)
        if packed is None:
            packed = repack_layer(self._source.packed_layer(index), self._ram.codec)
            self._packed.add(index, packed)
        return unpack_layer(packed)

    def keep(self, index: int, layer: LayerKV) -> None:
        if self._device is None or self._uploads is None or not self._uploads.begin():
            return
        try:
            self._uploads.add(index, self._device.place(index, layer))
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._uploads.end()
            self._device.tell_no_room(error)

    def finish(self) -> None:
        if self._packed is not None and self._to_ram is not None:
            packed = self._packed.complete(self._source.packed_layer)
            if packed is not None:
                self._to_ram(PackedKV(self.token_ids, self.start, tuple(packed), self.context))
        device, uploads = self._device, self._uploads
        if device is None or uploads is None or self._to_device is None:
            return
        try:
            layers = uploads.complete(lambda number: device.place(number, self._source.layer(number)))
        except (torch.OutOfMemoryError, MemoryError) as error:
            device.tell_no_room(error)
            return
        if layers is not None:
            self._to_device(ResidentKV(self.token_ids, self.start, layers, self.context))
