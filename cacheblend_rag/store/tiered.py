"""The store: names, and RAM over disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import TypeVar

from cacheblend_rag.codec import PackedKV, PackedLayer, unpack_layer
from cacheblend_rag.errors import ChunkReadError, StoreError, StoreFullError
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store.base import KVReader, NodeRecord, StoreStats
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.database import Database
from cacheblend_rag.store.disk import DiskTier
from cacheblend_rag.store.folder import valid_key
from cacheblend_rag.store.index import Dropped, Index
from cacheblend_rag.store.names import Names
from cacheblend_rag.store.probe import TierProbe, disk_probe, ram_probe
from cacheblend_rag.store.ram import RamReader, RamTier

__all__ = ["TieredStore"]

_log = getLogger(__name__)

Result = TypeVar("Result")


class TieredStore:
    """A `KVStore` in RAM, or in RAM over a folder on disk.

    With a folder, RAM holds copies of what is on disk, never anything else: KV is dropped on disk first and in RAM second, and
    what was put or read whole is checked against the index once it is in RAM. So no deletion, by this process or another,
    leaves a copy.

    Parameters
    ----------
    ram : RamTier
        The memory.
    disk : DiskTier, optional
        The folder; without one everything ends with this object.
    """

    def __init__(self, ram: RamTier, disk: DiskTier | None = None) -> None:
        self._ram = ram
        self._disk = disk
        self._database = disk.database if disk else Database(None)
        self._index = Index(self._database)
        self._names = Names(self._database)
        self._deletions_seen = self._index.deletions()
        self._closed = False

    @property
    def is_private(self) -> bool:
        """Whether the store's contents end with this process and are reachable through this object alone."""
        return self._disk is None

    @property
    def path(self) -> Path | None:
        """The folder, if there is one and it may be written."""
        return self._disk.folder.path if self._disk and not self._disk.read_only else None

    def probes(self) -> list[TierProbe]:
        """Return what puts chunks into each tier only to measure how fast they are read."""
        if self._disk is None or self._disk.read_only:
            return [partial(ram_probe, self._ram.codec)]
        return [partial(ram_probe, self._ram.codec), partial(disk_probe, self._disk.folder, self._disk.codec)]

    def open(self, key: str) -> KVReader | None:
        """Return a reader of the KV under `key` and mark it as recently used, or None if it is not held."""
        valid_key(key)
        self._check_open()
        self._notice_deletions()
        kv = self._ram.get(key)
        if kv is not None:
            if self._disk:
                self._disk.touch(key)
            return RamReader(kv)
        file = self._disk.open(key) if self._disk else None
        if file is not None:
            # Packing never makes KV larger, unpacking may.
            nbytes = file.kv_bytes if self._ram.codec.name == "native" else file.packed_bytes
            if self._ram.reserve(nbytes):
                return _PromotingReader(file, self._ram, nbytes, self._keep)
        return file

    def put(self, key: str, kv: ChunkKV) -> None:
        """Keep `kv` under `key`; on return it is on disk, if there is a folder.

        Raises
        ------
        StoreFullError
            If it cannot be kept: the disk is full, or it alone exceeds the byte budget.
        StoreReadOnlyError
            If the folder may not be written.
        """
        valid_key(key)
        self._check_open()
        if self._disk:
            # Packed once where both tiers use one codec.
            packed = self._ram.pack(kv) if self._ram.codec == self._disk.codec else kv
            self._ram.drop(self._disk.put(key, packed))
            self._keep(key, packed)
        elif not self._ram.put(key, kv):
            nbytes = self._ram.pack(kv).nbytes
            raise StoreFullError(
                f"a chunk of {nbytes} bytes exceeds the store's budget of {self._ram.limit_bytes} bytes (ram_bytes)"
            )

    def cache(self, key: str, kv: ChunkKV) -> None:
        """Keep `kv` in RAM only, until room is needed; for KV that has no name by which it could be deleted."""
        self._check_open()
        self._ram.put(valid_key(key), kv)

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its KV is held."""
        self._check_open()
        return self._disk.holds(keys) if self._disk else [self._ram.holds(key) for key in keys]

    def discard(self, key: str) -> None:
        """Drop the KV under `key`, damaged or not wanted any more; names stay."""
        self._check_open()
        if self._disk:
            self._disk.discard(key)
        self._ram.drop([key])

    def release(self, keys: Sequence[str]) -> None:
        """Drop the KV under those of the keys that no name maps to."""
        self._drop(self._deleting(lambda: self._names.release(keys, self._writer())))

    def name(self, namespace: str, records: Iterable[NodeRecord]) -> None:
        """Record names, replacing earlier records of the same ids; KV that loses its last name is dropped."""
        records = list(records)
        if records:
            self._drop(self._names.record(namespace, records, self._writer()))

    def lookup(self, namespace: str, ids: Sequence[str]) -> list[NodeRecord | None]:
        """Return the record of each id, or None where the name is unknown."""
        return self._names.lookup(namespace, ids)

    def forget(self, namespace: str, ids: Sequence[str]) -> int:
        """Remove names, and drop KV that loses its last name; return how many names there were."""
        if not ids:
            return 0
        count, dropped = self._deleting(lambda: self._names.remove(namespace, ids, self._writer()))
        self._drop(dropped)
        return count

    def names(self, namespace: str) -> list[str]:
        """Return all ids of a namespace, in the order they were first recorded."""
        return self._names.ids(namespace)

    def revision(self) -> int:
        """Return a number that every change to a name raises, by whatever process."""
        return self._names.revision()

    def clear(self) -> None:
        """Drop all KV and all names of every namespace."""
        dropped = self._deleting(lambda: self._index.clear(self._writer()))
        self._ram.clear()
        self._drop(dropped)

    def stats(self) -> StoreStats:
        """Return the store's figures."""
        self._notice_deletions()
        disk = self._disk
        return StoreStats(
            nodes=self._names.count(),
            entries=self._index.entry_count() if disk else len(self._ram),
            ram_bytes=self._ram.used_bytes,
            disk_bytes=self._index.entry_bytes() if disk else 0,
            evictions=disk.evictions if disk else self._ram.evictions,
        )

    def close(self) -> None:
        """Release files and connections; further calls are errors. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self._ram.clear()
        if self._disk:
            self._disk.close()
        else:
            self._database.close()

    def _keep(self, key: str, kv: ChunkKV | PackedKV) -> None:
        self._ram.put(key, kv)
        try:
            held = self.holds([key])[0]
        except StoreError:
            # A reader may come to its end after the store was closed.
            held = False
        if not held:
            self._ram.drop([key])

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed; open it again")

    def _writer(self) -> str:
        return self._disk.folder.writers.own() if self._disk else ""

    def _deleting(self, delete: Callable[[], Result]) -> Result:
        return self._disk.deleting(delete) if self._disk else delete()

    def _drop(self, dropped: Dropped) -> None:
        self._ram.drop(dropped.keys)
        if self._disk:
            self._disk.remove(dropped)

    def _notice_deletions(self) -> None:
        """Drop from RAM what other processes have deleted from the folder."""
        if not self._disk:
            return
        seen = self._deletions_seen
        now = self._index.deletions()
        if now == seen:
            return
        gone = self._index.deleted_since(seen)
        if gone is None:
            held = self._ram.keys()
            gone = [key for key, there in zip(held, self._index.holds(held), strict=True) if not there]
        self._ram.drop(gone)
        self._deletions_seen = now


class _PromotingReader:
    """Reads a file layer by layer, and hands its KV to RAM when the last one was read."""

    def __init__(
        self, file: ChunkFile, ram: RamTier, reserved_bytes: int, keep: Callable[[str, PackedKV], None]
    ) -> None:
        self._file = file
        self._ram = ram
        self._keep = keep
        self._lock = threading.Lock()
        self._layers: dict[int, PackedLayer] = {}
        self._reading = 0
        self._ends = False
        self._reserved_bytes = reserved_bytes

    def __del__(self) -> None:
        self._ram.give_back(self._reserved_bytes)

    @property
    def tier(self) -> str:
        """Where the bytes are read from."""
        return self._file.tier

    @property
    def codec(self) -> str:
        """How its layers are packed there, most of them if not all alike."""
        return self._file.codec

    @property
    def packed_bytes(self) -> int:
        """Size of all layers as they are packed there."""
        return self._file.packed_bytes

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the KV was computed from."""
        return self._file.token_ids

    @property
    def start(self) -> int:
        """The position that the keys of its first token are rotated to."""
        return self._file.start

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return self._file.num_layers

    def layer(self, index: int) -> LayerKV:
        """Return one layer, read once; the caller must not write to it.

        Raises
        ------
        ChunkReadError
            If the bytes are gone, or do not match their checksum.
        """
        with self._lock:
            held = self._layers.get(index)
            if held is None:
                self._reading += 1
        if held is not None:
            return unpack_layer(held)
        try:
            packed = self._file.packed_layer(index)
            layer = self._ram.repack(packed) if self._reserved_bytes else packed
        finally:
            with self._lock:
                self._reading -= 1
        self._hold(index, layer)
        return unpack_layer(layer)

    def _hold(self, index: int, layer: PackedLayer) -> None:
        with self._lock:
            if not self._reserved_bytes:
                return
            self._layers[index] = layer
            # The last layer may be read before others are that another thread has begun.
            self._ends = self._ends or index == self.num_layers - 1 or len(self._layers) == self.num_layers
            if not self._ends or self._reading:
                return
            layers, self._layers = self._layers, {}
            reserved, self._reserved_bytes = self._reserved_bytes, 0
        self._ram.give_back(reserved)
        self._complete(layers)

    def _complete(self, layers: dict[int, PackedLayer]) -> None:
        """Give the layers to RAM, with the few that nobody asked for because their KV is computed in full."""
        missing = [number for number in range(self.num_layers) if number not in layers]
        if len(missing) * 2 > self.num_layers:
            return
        try:
            layers.update((number, self._file.packed_layer(number)) for number in missing)
        except ChunkReadError as error:
            _log.warning("%s", error)
            return
        self._keep(
            self._file.key, PackedKV(self.token_ids, self.start, tuple(layers[n] for n in range(self.num_layers)))
        )
