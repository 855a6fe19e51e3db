"""The tiers of a store: KV on a device, in RAM and on disk, and copies that move up."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

import torch

from cacheblend_rag.codec import PackedKV, pack_kv, unpack_layer
from cacheblend_rag.errors import ChunkReadError, StoreError, StoreFullError, StoreReadOnlyError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.store.base import Entry, Fate, KVReader, StoreStats, count_of, latest
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.disk import DiskTier
from cacheblend_rag.store.index import Index
from cacheblend_rag.store.memory import DeviceReader, DeviceTier, RamReader, RamTier, ResidentKV

__all__ = ["Promotion", "PromotingReader", "Tiers"]

_log = getLogger(__name__)

Result = TypeVar("Result")


class Tiers:
    """KV on this machine: on disk, with copies in RAM and on devices; without a disk RAM has all of it.

    KV is dropped on disk first and in memory second, and what enters memory is checked against the disk once it is there, so that
    no deletion, by any process, leaves a copy. Nothing is on a device that is not in a slower tier too. KV expires
    by `clock`, in seconds.
    """

    def __init__(
        self, clock: Callable[[], float], device: DeviceTier, ram: RamTier, disk: DiskTier | None = None
    ) -> None:
        self.index, self.clock = Index() if disk is None else disk.index, clock
        self.device, self.ram, self.disk = device, ram, disk
        self._closed = False
        # What the copies were last compared with: evictions from RAM, or deletions from the index.
        self._seen = 0 if disk is None else self.index.deletions()

    @property
    def path(self) -> Path | None:
        """The folder, if there is one and it may be written."""
        return None if self.disk is None or self.disk.read_only else self.disk.folder.path

    def stats(self, tenant: str | None) -> StoreStats:
        """Return the figures of what is held, by one tenant or all."""
        entries, nbytes, names = self.index.share(tenant)
        if self.disk is None:
            entries = len(self.ram.keys(tenant))
        return StoreStats(
            nodes=names,
            entries=entries,
            ram_bytes=self.ram.nbytes(tenant),
            disk_bytes=nbytes,
            evictions=self.ram.evictions(tenant) if self.disk is None else count_of(self.disk.evicted, tenant),
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
            return self.promoting(key, reader, cached) if self.device.limit_bytes else reader
        # What has expired in memory may have been given a longer life on disk.
        found = None if self.disk is None else self.disk.find(key)
        if found is None:
            return None
        file, entry = found
        return self.promoting(key, file, entry, lambda kv: self._keep(key, replace(entry, kv=kv)))

    def put(self, key: str, entry: Entry, wanted: Callable[[sqlite3.Connection], bool] | None = None) -> None:
        """Keep KV, unless `wanted`, called in a transaction, returns False; `StoreFullError` where there is no room."""
        if self.disk is not None:
            if self.disk.read_only:
                raise StoreReadOnlyError(f"store folder {self.disk.folder.path} is not writable; it can only be read")
            # RAM gets what the disk gives back, so that an answer is the same before and after a restart.
            entry = replace(entry, kv=pack_kv(entry.kv, self.disk.codec))
            self.drop(self.disk.put(key, entry, wanted))
            if wanted is None or self.disk.holds([key])[0]:
                self._keep(key, entry)
            return
        held = self.ram.peek(key)
        if held is not None:
            entry = replace(entry, tenant=held.tenant, expires_at=latest(held.expires_at, entry.expires_at))
        self.device.drop([key])
        has_room = self.ram.keep(key, entry)
        if wanted is not None and not self.index.transact(wanted):
            self.drop([key])
        self.follow()
        if not has_room:
            nbytes, limit_bytes = pack_kv(entry.kv, self.ram.codec).nbytes, self.ram.limit_bytes
            raise StoreFullError(
                f"a chunk of {nbytes} bytes exceeds the store's budget of {limit_bytes} bytes (ram_bytes)"
            )

    def holds(self, keys: Sequence[str], durable: bool = False) -> list[bool]:
        """Return for each key whether its KV is held, and not only a copy of what is gone.

        Over a disk, what is in RAM alone for want of a name is not `durable`.
        """
        on_disk = [False] * len(keys) if self.disk is None else self.disk.holds(keys)
        if durable and self.disk is not None:
            return on_disk
        now = self.clock()
        cached = map(self.ram.peek, keys)
        return [
            there or (entry is not None and entry.is_live(now) and (self.disk is None or entry.tied is not None))
            for there, entry in zip(on_disk, cached, strict=True)
        ]

    def drop(self, keys: Iterable[str]) -> None:
        """Drop copies of what is not on disk any more."""
        keys = list(keys)
        # In this order: what rises to the device meanwhile looks into RAM once it is there.
        self.ram.drop(keys)
        self.device.drop(keys)

    def discard(self, key: str, wait: bool) -> None:
        try:
            if self.disk is not None:
                self.disk.discard(key, wait)
        finally:
            self.drop([key])

    def fates(self, keys: Sequence[str]) -> dict[str, Fate]:
        # What has no name is kept in RAM alone.
        fates: dict[str, Fate] = dict.fromkeys(self.ram.dropped_lately(keys), "evicted")
        return fates if self.disk is None else fates | self.disk.fates(keys)

    def prolong(self, keys: Sequence[str], expires_at: float | None) -> None:
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
        self._seen = now

    def with_room(self, write: Callable[[], Result], spared: Collection[str] = ()) -> Result:
        """Return what `write` returns, where the disk is full once there is room; none of the `spared` keys goes for that."""
        return write() if self.disk is None else self.disk.with_room(write, spared=spared)

    def clear(self, tenant: str | None) -> None:
        """Drop all that is in memory, or what one tenant has there."""
        self.drop([*self.ram.keys(tenant), *self.device.keys(tenant)])

    def close(self) -> None:
        self._closed = True
        self.clear(None)
        if self.disk is None:
            self.index.close()
        else:
            self.disk.close()

    def promoting(
        self, key: str, source: ChunkFile | RamReader, entry: Entry, to_ram: Callable[[PackedKV], None] | None = None
    ) -> KVReader:
        """Return a reader of what is under a key that brings it into faster tiers where it fits."""
        in_ram = on_device = None
        if to_ram is not None:
            # Packing never makes KV larger, unpacking may.
            nbytes = source.kv_bytes if self.ram.codec.name == "native" else source.packed_bytes
            in_ram = Promotion(self.ram, source, nbytes, source.packed_layer, to_ram)
        if 0 < source.kv_bytes <= self.device.limit_bytes:
            keep = partial(self._keep_on_device, key, entry)
            on_device = Promotion(self.device, source, source.kv_bytes, source.layer, keep)
        return PromotingReader(source, in_ram, on_device) if in_ram or on_device else source

    def _keep(self, key: str, entry: Entry) -> None:
        """Keep in RAM what is on disk, unless it was dropped there meanwhile."""
        if self.ram.keep(key, entry):
            self._check_copy(key)

    def _keep_on_device(self, key: str, entry: Entry, kv: ResidentKV) -> None:
        """Keep a copy on its device, unless slower tiers have dropped it meanwhile."""
        # In RAM its life may have been prolonged since.
        if self.device.keep(key, replace(self.ram.peek(key) or entry, kv=kv)):
            self._check_copy(key)

    def _check_copy(self, key: str) -> None:
        """Drop what has just been copied to memory if slower tiers do not hold it any more, or the store is closed."""
        try:
            if not self._closed and self.holds([key])[0]:
                return
        except StoreError:
            # Closed between the two.
            pass
        self.drop([key])


class Promotion:
    """The layers of one chunk on their way to a faster tier, which keeps room for all of them from the first one on."""

    def __init__(
        self,
        tier: RamTier | DeviceTier,
        source: KVReader,
        nbytes: int,
        read: Callable[[int], Any],
        keep: Callable[[Any], None],
    ) -> None:
        self._tier, self._source, self._nbytes, self._read, self._keep = tier, source, nbytes, read, keep
        self._lock = threading.Lock()
        self._began = False
        self._layers: dict[int, Any] | None = None

    def __del__(self) -> None:
        # Takes no lock, being a finalizer.
        if self._layers is not None:
            self._tier.give_back(self._nbytes)

    def begin(self) -> dict[int, Any] | None:
        """Return the layers that are there, for which room is reserved the first time; None where there is no room."""
        with self._lock:
            if not self._began:
                self._began = True
                self._layers = {} if self._tier.reserve(self._nbytes) else None
            return self._layers

    def get(self, index: int, raw: Any = None) -> Any:
        """Return a layer, which is read the first time unless it is given; None where there is no room for the chunk."""
        layers = self.begin()
        if layers is None:
            return None
        try:
            if index not in layers:
                layers[index] = self._tier.place(index, self._read(index) if raw is None else raw)
            return layers[index]
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._end()
            self._tier.tell_no_room(error)

    def finish(self) -> None:
        """Hand the chunk over, unless most of it is wanting; the few layers not asked for, their KV being computed, are read."""
        chunk, indices = self._source, range(self._source.num_layers)
        try:
            if 2 * len(self._layers or ()) >= len(indices):
                for index in indices:
                    self.get(index)
        except ChunkReadError as error:
            _log.warning("%s", error)
        layers = self._end() or {}
        if len(layers) == len(indices):
            every = [layers[index] for index in indices]
            self._keep(self._tier.kind(chunk.token_ids, chunk.start, every, chunk.context))

    def _end(self) -> dict[int, Any] | None:
        """Give the room back, if that is still to be done, and return what came of the chunk."""
        with self._lock:
            layers, self._layers = self._layers, None
        if layers is not None:
            self._tier.give_back(self._nbytes)
        return layers


class PromotingReader(KVReader):
    """Reads a file or KV in RAM, and hands what it has read to RAM and to the device tier in `finish`."""

    def __init__(self, source: ChunkFile | RamReader, to_ram: Promotion | None, to_device: Promotion | None) -> None:
        chunk = source.token_ids, source.start, source.context
        super().__init__(*chunk, source.num_layers, source.codec, source.packed_bytes)
        self.tier = source.tier
        self.promotes_to_device = to_device is not None
        self._source, self._to_ram, self._to_device = source, to_ram, to_device
        if to_ram is not None:
            to_ram.begin()

    def layer(self, index: int) -> LayerKV:
        """Return one layer, read once where it goes to RAM; the caller must not write to it."""
        packed = None if self._to_ram is None else self._to_ram.get(index)
        return self._source.layer(index) if packed is None else unpack_layer(packed)

    def keep(self, index: int, layer: LayerKV) -> None:
        if self._to_device is not None:
            self._to_device.get(index, layer)

    def finish(self) -> None:
        for promotion in (self._to_ram, self._to_device):
            if promotion is not None:
                promotion.finish()
