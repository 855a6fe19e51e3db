"""The store: names, and the devices' memory over RAM over disk over a remote tier."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import TypeVar

from cacheblend_rag.codec import PackedKV
from cacheblend_rag.errors import StoreError, StoreFullError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.reading import ReadingRules
from cacheblend_rag.store.base import KVReader, NameChanges, NamedTarget, NodeRecord, StoreStats
from cacheblend_rag.store.clock import StoreClock
from cacheblend_rag.store.copies import Copies
from cacheblend_rag.store.database import Database
from cacheblend_rag.store.device import DeviceTier
from cacheblend_rag.store.disk import DiskTier
from cacheblend_rag.store.entries import Dropped
from cacheblend_rag.store.folder import valid_key
from cacheblend_rag.store.index import Index
from cacheblend_rag.store.names import Names, name_waiting
from cacheblend_rag.store.offsite import Offsite
from cacheblend_rag.store.probe import TierProbe, device_probe, disk_probe, ram_probe
from cacheblend_rag.store.promote import PromotingReader
from cacheblend_rag.store.ram import RamReader, RamTier
from cacheblend_rag.store.tenants import Tenants
from cacheblend_rag.store.writeback import WaitingChunk, WriteBack

__all__ = ["TieredStore"]

_log = getLogger(__name__)

Result = TypeVar("Result")


class TieredStore:
    """A `KVStore` in RAM, or in RAM over a folder on disk, either of them over a remote tier and below the device tier.

    With a folder, RAM holds copies of what is on disk, what waits to be written, and nothing else: KV is dropped on disk first
    and in RAM second, and what was put or read whole is checked against the index once it is in RAM. So no deletion, by this
    process or another, leaves a copy. The device tier is to RAM and disk what RAM is to the disk.

    The remote tier gets a copy of what is put, in the background, and keeps it when the disk needs room. What is found there
    alone is read from there, and kept in RAM and on disk. Only KV without a time to live goes there.

    Parameters
    ----------
    ram : RamTier
        The memory.
    disk : DiskTier, optional
        The folder; without one everything ends with this object.
    write_back_bytes : int
        Most bytes of KV that may wait to be written; with 0 nothing waits, and `put_later` is as durable as `put`.
    clock : StoreClock, optional
        What tells when KV expires; a folder has its own.
    offsite : Offsite, optional
        The remote tier.
    device : DeviceTier, optional
        Memory of the devices that compute; without one nothing is kept there.
    """

    def __init__(
        self,
        ram: RamTier,
        disk: DiskTier | None = None,
        write_back_bytes: int = 0,
        clock: StoreClock | None = None,
        offsite: Offsite | None = None,
        device: DeviceTier | None = None,
    ) -> None:
        self._ram = ram
        self._disk = disk
        self._offsite = offsite
        self._database = disk.database if disk else Database(None)
        self._clock = disk.clock if disk else (clock or StoreClock())
        self._index = Index(self._database)
        self._names = Names(self._database)
        self._tenants = Tenants(self._database)
        self._waiting = WriteBack(self._write, write_back_bytes)
        self._device = DeviceTier(0) if device is None else device
        self._copies = Copies(ram, self._device, self._clock, self._names, disk)
        self._closed = False

    @property
    def is_private(self) -> bool:
        """Whether the store's contents end with this process and are reachable through this object alone."""
        return self._disk is None and self._offsite is None

    @property
    def evictions(self) -> int:
        """Entries dropped for room since the store was opened."""
        return self._disk.evictions if self._disk else self._ram.evictions

    @property
    def path(self) -> Path | None:
        """The folder, if there is one and it may be written."""
        return self._disk.folder.path if self._disk and not self._disk.read_only else None

    def probes(self) -> list[TierProbe]:
        """Return what puts chunks into each tier only to measure how fast they are read."""
        probes: list[TierProbe] = [partial(device_probe, self._device)] if self._device.limit_bytes else []
        probes.append(partial(ram_probe, self._ram.codec))
        if self._disk and not self._disk.read_only:
            probes.append(partial(disk_probe, self._disk.folder, self._disk.codec))
        return probes

    def open(self, key: str) -> KVReader | None:
        """Return a reader of the KV under `key` and mark it as recently used, or None if it is not held."""
        valid_key(key)
        self._check_open()
        self._copies.follow()
        waiting = self._waiting.get(key)
        if waiting is not None:
            return RamReader(waiting)
        copy = self._copies.open(key)
        if copy is not None:
            if self._disk:
                self._disk.touch(key)
            return copy
        found = self._disk.find(key) if self._disk else None
        if found is not None:
            file, entry = found
            note = partial(self._copies.note, key, entry.tenant, entry.expires_at)
            keep: Callable[[str, PackedKV], None] = partial(
                self._copies.keep, tenant=entry.tenant, expires_at=entry.expires_at
            )
        else:
            remote = self._offsite.open(key) if self._offsite else None
            if remote is None:
                return None
            was_named = self._names.leading_to(key) is not None
            file, keep, note = remote, partial(self._bring_back, was_named=was_named), None
        # Packing never makes KV larger, unpacking may.
        nbytes = file.kv_bytes if self._ram.codec.name == "native" else file.packed_bytes
        reader = PromotingReader(file, self._ram, nbytes, keep) if self._ram.reserve(nbytes) else file
        return self._copies.rising(key, reader, file.kv_bytes, note)

    def put(self, key: str, kv: ChunkKV, *, tenant: str = "", ttl_s: float | None = None) -> None:
        """Keep `kv` under `key`; on return it is on disk, if there is a folder.

        Raises
        ------
        StoreFullError
            If it cannot be kept: the disk is full, it alone exceeds the byte budget, or pinned KV does.
        StoreReadOnlyError
            If the folder may not be written.
        """
        valid_key(key)
        self._check_open()
        expires_at = self._expires_at(ttl_s)
        if self._disk:
            # Packed once where both tiers use one codec.
            packed = self._ram.pack(kv) if self._ram.codec == self._disk.codec else kv
            self._copies.drop(self._disk.put(key, packed, tenant, expires_at))
            self._copies.keep(key, packed, tenant, expires_at)
            self._send(key, kv, expires_at)
            return
        if self._ram.holds(key):
            self._copies.prolong(key, expires_at)
        else:
            self._copies.note(key, tenant, expires_at)
        if not self._ram.put(key, kv):
            nbytes = self._ram.pack(kv).nbytes
            raise StoreFullError(
                f"a chunk of {nbytes} bytes exceeds the store's budget of {self._ram.limit_bytes} bytes (ram_bytes)"
                if nbytes > self._ram.limit_bytes
                else f"pinned KV leaves no {nbytes} bytes of the store's budget of {self._ram.limit_bytes} bytes (ram_bytes); "
                "unpin some, or raise the budget"
            )
        self._ram.pin(self._names.pinned([key]))
        self._send(key, kv, expires_at)

    def put_later(
        self,
        key: str,
        kv: ChunkKV | PackedKV,
        namespace: str,
        records: Sequence[NodeRecord],
        known: Sequence[str] = (),
        *,
        tenant: str = "",
        ttl_s: float | None = None,
    ) -> bool:
        """Keep KV that was computed for an answer, and its names, and write both soon; see `KVStore.put_later`."""
        valid_key(key)
        self._check_open()
        if self._disk and self._disk.read_only:
            # Says so by an error.
            self._disk.put(key, kv)
        chunk = WaitingChunk(key, kv, namespace, tenant, list(records), list(known), self._expires_at(ttl_s))
        if self._disk and self._waiting.limit_bytes:
            return self._waiting.offer(chunk)
        self._write(chunk)
        return True

    def settle(self) -> None:
        """Wait until everything that waited to be written to disk is, or has failed to be."""
        self._waiting.settle()

    def flush(self) -> None:
        """Wait until everything that waited to be written or uploaded is, and raise the first error of writing that was met.

        Raises
        ------
        StoreError
            If something could not be written since the last call.
        """
        self._waiting.flush()
        if self._offsite:
            self._offsite.flush()

    def cache(self, key: str, kv: ChunkKV | PackedKV, *, tenant: str = "", ttl_s: float | None = None) -> None:
        """Keep `kv` in RAM only, until room is needed; for KV that has no name by which it could be deleted."""
        self._check_open()
        self._copies.note(valid_key(key), tenant, self._expires_at(ttl_s))
        self._ram.put(key, kv)

    def holds(self, keys: Sequence[str], *, durable: bool = False) -> list[bool]:
        """Return for each key whether its KV is held; with `durable` what waits to be written does not count."""
        self._check_open()
        waiting = [not durable and self._waiting.get(key) is not None for key in keys]
        if self._disk:
            there = self._disk.holds(keys)
        else:
            there = [self._ram.holds(key) and not self._copies.has_expired(key) for key in keys]
        held = [one or other for one, other in zip(waiting, there, strict=True)]
        if self._offsite and not all(held):
            elsewhere = iter(self._offsite.holds([key for key, here in zip(keys, held, strict=True) if not here]))
            held = [here or next(elsewhere) for here in held]
        return held

    def lifetimes(self, keys: Sequence[str]) -> list[float | None]:
        """Return for how many seconds from now the KV under each key lives, infinity for ever; None where none is held here."""
        self._check_open()
        now = self._clock.now()
        return [self._lifetime(key, now) for key in keys]

    def prolong(self, keys: Sequence[str], ttl_s: float | None) -> None:
        """Let KV that is held live for that long from now at least; None is for ever."""
        self._check_open()
        expires_at = self._expires_at(ttl_s)
        if self._disk:
            self._index.prolong(keys, expires_at)
        for key in keys:
            self._copies.prolong(key, expires_at)

    def discard(self, key: str) -> None:
        """Drop the KV under `key`, damaged or not wanted any more; names stay."""
        self._check_open()
        self._waiting.drop(key=key)
        if self._disk:
            self._disk.discard(key)
        self._copies.drop([key])
        if self._offsite:
            self._offsite.drop([key])

    def release(self, keys: Sequence[str]) -> None:
        """Drop the KV under those of the keys that no name maps to."""
        self._drop(self._deleting(lambda: self._names.release(keys, self._writer())))

    def name(
        self,
        namespace: str,
        records: Iterable[NodeRecord],
        *,
        tenant: str = "",
        rules: ReadingRules | None = None,
        ttl_s: float | None = None,
    ) -> None:
        """Record names, replacing earlier records of the same ids; see `KVStore.name`."""
        records = list(records)
        if records:
            ends = self._expires_at(ttl_s)
            now = self._clock.now()
            self._drop(
                self._names.record(namespace, records, self._writer(), tenant, rules=rules, expires_at=ends, now=now)
            )

    def rehearse(
        self,
        namespace: str,
        records: Sequence[NodeRecord],
        *,
        rules: ReadingRules | None = None,
        ttl_s: float | None = None,
    ) -> list[NamedTarget]:
        """Return what `name` would lead to, without recording anything; see `KVStore.rehearse`."""
        return self._names.rehearse(namespace, records, rules, self._expires_at(ttl_s), self._clock.now())

    def targets(self, namespace: str, ids: Sequence[str]) -> list[NamedTarget | None]:
        """Return how the KV of each name is computed; None where the name is unknown."""
        waiting = self._waiting.records(namespace)
        found = self._names.targets(namespace, ids, self._clock.now())
        return [
            target or (NamedTarget(waiting[node]) if node in waiting else None)
            for node, target in zip(ids, found, strict=True)
        ]

    def documents(self, namespace: str, ids: Sequence[str]) -> list[str | None]:
        """Return the document that each name is a piece of; None where it is one of none, or unknown."""
        return self._names.documents(namespace, ids)

    def document(self, namespace: str, document: str) -> list[str]:
        """Return the ids of a document's chunks in reading order."""
        return self._names.document(namespace, document)

    def document_tokens(self, namespace: str, document: str) -> tuple[int, ...]:
        """Return the tokens of a whole document; what overlaps stands there once."""
        return self._names.document_tokens(namespace, document)

    def lookup(self, namespace: str, ids: Sequence[str]) -> list[NodeRecord | None]:
        """Return the record of each id, or None where the name is unknown."""
        # In this order: what stops waiting in between is found in the index.
        waiting = self._waiting.records(namespace)
        found = self._names.lookup(namespace, ids)
        return [record or waiting.get(node) for node, record in zip(ids, found, strict=True)] if waiting else found

    def forget(self, namespace: str, ids: Sequence[str]) -> int:
        """Remove names, and drop KV that loses its last name; return how many names there were."""
        if not ids:
            return 0
        waited = self._waiting.forget(namespace, ids)
        found, dropped = self._deleting(lambda: self._names.remove(namespace, ids, self._writer(), self._clock.now()))
        self._drop(dropped)
        return len(found | waited)

    def names(self, namespace: str) -> list[str]:
        """Return all ids of a namespace, in the order they were first recorded."""
        waiting = self._waiting.records(namespace)
        return list(dict.fromkeys([*self._names.ids(namespace), *waiting]))

    def revision(self) -> int:
        """Return a number that every change to a name raises, by whatever process."""
        return self._names.revision() + self._waiting.changes

    def changes(self, namespace: str, since: int | None = None) -> NameChanges:
        """Return the names that changed since an earlier call, by the mark that it gave; all, if that was too long ago."""
        # What is written in between is then found twice rather than not at all.
        waiting = {node: record.text_hash for node, record in self._waiting.records(namespace).items()}
        return NameChanges(*self._names.changes(namespace, since), waiting)

    def pin(self, namespace: str, ids: Sequence[str]) -> None:
        """Never evict the KV of these names, now held or later.

        Raises
        ------
        UnknownChunkError
            If a name is unknown; nothing is pinned then.
        StoreFullError
            If more would be pinned than the disk's byte budget.
        """
        self._pin(namespace, ids, True)

    def unpin(self, namespace: str, ids: Sequence[str]) -> None:
        """Let the KV of these names be evicted again.

        Raises
        ------
        UnknownChunkError
            If a name is unknown; nothing is unpinned then.
        """
        self._pin(namespace, ids, False)

    def clear(self, tenant: str | None = None) -> None:
        """Drop all KV and all names, or those of one tenant; "" is for what is no tenant's."""
        self._waiting.drop(tenant=tenant)
        dropped = self._deleting(lambda: self._index.clear(self._writer(), tenant))
        self._copies.clear(tenant)
        self._drop(dropped)

    def tenants(self) -> list[str]:
        """Return the tenants that have KV or names; "" stands for what is no tenant's."""
        return self._tenants.all()

    def stats(self, tenant: str | None = None) -> StoreStats:
        """Return the store's figures, or one tenant's."""
        self._copies.follow()
        disk = self._disk
        entries, nbytes, names = self._tenants.share(tenant)
        waiting, waiting_bytes = self._waiting.waiting
        copies = self._copies
        return StoreStats(
            nodes=names,
            entries=entries if disk else len(copies.owned(self._ram, tenant)),
            ram_bytes=copies.nbytes(self._ram, tenant),
            disk_bytes=nbytes if disk else 0,
            evictions=self.evictions,
            pinned_bytes=self._index.pinned_bytes() if disk else self._ram.nbytes(self._ram.pinned()),
            waiting=waiting,
            waiting_bytes=waiting_bytes,
            unwritten=self._waiting.refused,
            device_bytes=copies.nbytes(self._device, tenant),
            ram_evictions=self._ram.evictions,
            device_evictions=self._device.evictions,
        )

    def close(self) -> None:
        """Write what waits, then release files and connections; further calls are errors. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        # What cannot be written was told as a warning.
        self._waiting.settle()
        if self._offsite:
            self._offsite.close()
        self._copies.close()
        if self._disk:
            self._disk.close()
        else:
            self._database.close()

    def _write(self, chunk: WaitingChunk) -> None:
        """Write one chunk and its names, unless its last name is gone."""

        def wanted(connection: sqlite3.Connection) -> bool:
            if chunk.cancelled:
                return False
            known = [(node, chunk.key) for node in chunk.known]
            return name_waiting(connection, chunk.namespace, chunk.tenant, chunk.records, known)

        if self._disk:
            self._copies.drop(self._disk.put(chunk.key, chunk.kv, chunk.tenant, chunk.expires_at, wanted))
            self._copies.keep(chunk.key, chunk.kv, chunk.tenant, chunk.expires_at)
            if not chunk.is_copy and self._disk.holds([chunk.key])[0]:
                self._send(chunk.key, chunk.kv, chunk.expires_at)
            return
        self._copies.note(chunk.key, chunk.tenant, chunk.expires_at)
        if not self._ram.put(chunk.key, chunk.kv) and not self._offsite:
            return
        if not self._index.transact(wanted):
            self._ram.drop([chunk.key])
            return
        self._ram.pin(self._names.pinned([chunk.key]))
        self._send(chunk.key, chunk.kv, chunk.expires_at)
        if self._offsite and self._names.leading_to(chunk.key) is None:
            # Deleted between the two.
            self._offsite.drop([chunk.key])

    def _send(self, key: str, kv: ChunkKV | PackedKV, expires_at: float | None) -> None:
        if self._offsite and expires_at is None:
            self._offsite.put(key, kv)
            if self._disk and not self._disk.holds([key])[0]:
                # Deleted between the two.
                self._offsite.drop([key])

    def _bring_back(self, key: str, kv: PackedKV, was_named: bool) -> None:
        """Keep what was found in the remote tier alone: on disk if a name leads to it, else in RAM, unless it lost its name."""
        named = self._names.leading_to(key)
        if named is None and was_named:
            return
        if named is None or not self._disk or not self._waiting.limit_bytes:
            self._ram.put(key, kv)
        elif not self._disk.read_only:
            namespace, tenant, ids = named
            self._waiting.offer(WaitingChunk(key, kv, namespace, tenant, [], ids, None, is_copy=True))

    def _pin(self, namespace: str, ids: Sequence[str], pinned: bool) -> None:
        self._check_open()
        self._waiting.settle()
        limit_bytes = self._disk.limit_bytes if self._disk else None
        keys = self._names.pin(namespace, ids, pinned, limit_bytes)
        if pinned:
            self._ram.pin(keys)
        else:
            self._copies.unpin()

    def _lifetime(self, key: str, now: float) -> float | None:
        waiting = self._waiting.find(key)
        entry = self._index.entry(key) if self._disk and waiting is None else None
        if waiting is not None:
            expires_at = waiting.expires_at
        elif entry is not None:
            expires_at = entry.expires_at
        elif self._ram.holds(key):
            expires_at = self._copies.expires_at(key)
        else:
            return None
        if expires_at is None:
            return math.inf
        return expires_at - now if expires_at > now else None

    def _expires_at(self, ttl_s: float | None) -> float | None:
        return None if ttl_s is None else self._clock.now() + ttl_s

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed; open it again")

    def _writer(self) -> str:
        return self._disk.folder.writers.own() if self._disk else ""

    def _deleting(self, delete: Callable[[], Result]) -> Result:
        return self._disk.deleting(delete) if self._disk else delete()

    def _drop(self, dropped: Dropped) -> None:
        self._copies.drop(dropped.keys)
        self._ram.pin(dropped.pinned)
        self._copies.unpin()
        if self._disk:
            self._disk.remove(dropped)
        if self._offsite and dropped.keys:
            self._offsite.drop(dropped.keys)
