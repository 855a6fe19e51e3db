"""The store as the engine sees it: names, and KV in the fastest tier that has it."""

from __future__ import annotations

import math
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from cacheblend_rag.codec import PackedKV
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.reading import ReadingRules
from cacheblend_rag.store.base import KVReader, NameChanges, NamedTarget, NodeRecord, StoreStats, TierProbe
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.clock import StoreClock
from cacheblend_rag.store.database import Database
from cacheblend_rag.store.device import DeviceTier, ResidentKV, device_probe
from cacheblend_rag.store.folder import valid_key
from cacheblend_rag.store.index import Dropped, Index
from cacheblend_rag.store.names import Names, name_waiting
from cacheblend_rag.store.promote import PromotingReader
from cacheblend_rag.store.ram import RamReader, RamTier, ram_probe
from cacheblend_rag.store.remote.offsite import Offsite

__all__ = ["Computed", "KVStore", "end_of"]

Result = TypeVar("Result")


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

    def name(self, connection: sqlite3.Connection) -> bool:
        """Record its names in a transaction that has begun; return whether any leads to it, or none does any more."""
        names = self.namespace, self.tenant, self.key, self.records, self.known
        return not self.cancelled and name_waiting(connection, *names)


class KVStore(ABC):
    """Chunk KV under content keys, and the names by which chunks are asked for; `open_store` makes one.

    A key is a digest of everything the KV depends on (model, tokenizer, encoding prefix, tokens) and of whose it is (the tenant),
    made by the engine. Names (node ids) live in a namespace, the digest of the model and the tenant, and map to keys; several
    names may share one key. KV that no name maps to may be kept until room is needed. All methods may be called from any thread.

    A time to live, `ttl_s`, makes KV a miss once it is over; None is for ever. Of several times asked for the longest counts.
    Names stay.

    Parameters
    ----------
    database : Database
        Where names are kept.
    clock : StoreClock
        What tells when KV expires.
    ram, device : RamTier and DeviceTier
        KV in this process's memory. Nothing is on a device that is not in a slower tier too.
    offsite : Offsite, optional
        The remote tier. It gets a copy of what is put, in the background, and keeps it when there is no more room here; what is
        found there alone is read from there, and kept here. Only KV without a time to live goes there.
    writer : callable, optional
        Returns the name under which this process writes to a folder.

    Attributes
    ----------
    path : Path or None
        The folder, if there is one and it may be written.
    """

    path: Path | None = None

    def __init__(
        self,
        database: Database,
        clock: StoreClock,
        ram: RamTier,
        device: DeviceTier,
        offsite: Offsite | None = None,
        writer: Callable[[], str] = str,
    ) -> None:
        self._database = database
        self._clock = clock
        self._ram = ram
        self._device = device
        self._offsite = offsite
        self._index = Index(database, writer)
        self._names = Names(database, clock.now, writer)
        self._closed = False

    @property
    @abstractmethod
    def is_private(self) -> bool:
        """Whether the store's contents end with this process and are reachable through this object alone."""

    @property
    @abstractmethod
    def evictions(self) -> int:
        """Entries dropped for room since the store was opened, as `stats` has it; cheap."""

    def probes(self) -> list[TierProbe]:
        """Return what puts chunks into each tier only to measure how fast they are read."""
        probes: list[TierProbe] = [partial(device_probe, self._device)] if self._device.limit_bytes else []
        return [*probes, partial(ram_probe, self._ram.codec)]

    @abstractmethod
    def open(self, key: str) -> KVReader | None:
        """Return a reader of the KV under `key` and mark it as recently used, or None if it is not held.

        KV that is seen to be damaged is dropped with a warning, and None returned. A reader stays good when its KV is dropped.
        """

    def put(self, key: str, kv: ChunkKV, *, tenant: str = "", ttl_s: float | None = None) -> None:
        """Keep `kv` under `key`; on return it is on disk, if there is a folder.

        If `key` is held and looks sound already, no KV is written.

        Raises
        ------
        StoreFullError
            If it cannot be kept: the disk is full, it alone exceeds the byte budget, or pinned KV does.
        StoreReadOnlyError
            If the folder may not be written.
        """
        self._check(key)
        expires_at = self._expires_at(ttl_s)
        self._put(key, kv, tenant, expires_at)
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
        """Keep KV that was computed for an answer, and its names, and write both soon; until then they are held in RAM.

        If the names are removed before it is written, it is not written, and was never there.

        Parameters
        ----------
        key : str
            The key.
        kv : ChunkKV or PackedKV
            The KV; packed already where it is not to be packed otherwise.
        namespace : str
            Where its names are.
        records : sequence of NodeRecord
            Names nobody knew, to be recorded unless somebody else has recorded them by then.
        known : sequence of str
            Names that were known to lead to it.
        tenant : str
            Whose it is.
        ttl_s : float, optional
            How long it lives.

        Returns
        -------
        bool
            False if too much is waiting already; the KV is then not kept.
        """
        self._check(key)
        return self._put_later(
            Computed(key, kv, namespace, tenant, list(records), list(known), self._expires_at(ttl_s))
        )

    def settle(self) -> None:  # noqa: B027 - without a folder nothing waits
        """Wait until everything that waited to be written is, or has failed to be."""

    def flush(self) -> None:
        """Wait until everything that waited to be written or uploaded is, and raise the first error of writing that was met.

        Raises
        ------
        StoreError
            If something could not be written since the last call.
        """
        if self._offsite:
            self._offsite.flush()

    def cache(self, key: str, kv: ChunkKV | PackedKV, *, tenant: str = "", ttl_s: float | None = None) -> None:
        """Keep `kv` in RAM only, until room is needed; for KV that has no name by which it could be deleted."""
        self._check(key)
        self._ram.put(key, kv, tenant, self._expires_at(ttl_s))

    def holds(self, keys: Sequence[str], *, durable: bool = False) -> list[bool]:
        """Return for each key whether its KV is held; with `durable` what waits to be written does not count."""
        self._check()
        held = self._hold(keys, durable)
        if self._offsite and not all(held):
            elsewhere = iter(self._offsite.holds([key for key, here in zip(keys, held, strict=True) if not here]))
            held = [here or next(elsewhere) for here in held]
        return held

    def lifetimes(self, keys: Sequence[str]) -> list[float | None]:
        """Return for how many seconds from now the KV under each key lives, infinity for ever; None where none is held here.

        What only a remote tier holds counts as not held.
        """
        self._check()
        now = self._clock.now()
        ends = [self._end(key) for key in keys]
        return [None if end is None or end <= now else end - now for end in ends]

    def prolong(self, keys: Sequence[str], ttl_s: float | None) -> None:
        """Let KV that is held live for that long from now at least."""
        self._check()
        self._prolong(keys, self._expires_at(ttl_s))

    def discard(self, key: str) -> None:
        """Drop the KV under `key`, damaged or not wanted any more; names stay.

        Where the store may not be written, this object does not open it again.
        """
        self._check()
        self._drop_copies([key])
        if self._offsite:
            self._offsite.drop([key])

    def release(self, keys: Sequence[str]) -> None:
        """Drop the KV under those of the keys that no name maps to."""
        self._drop(self._deleting(lambda: self._names.release(keys)))

    def name(
        self,
        namespace: str,
        records: Iterable[NodeRecord],
        *,
        tenant: str = "",
        rules: ReadingRules | None = None,
        ttl_s: float | None = None,
    ) -> None:
        """Record names, replacing earlier records of the same ids; KV that loses its last name is dropped.

        Chunks with a place are put into their documents, which are then read by `rules`. So the keys of chunks behind them change
        too, all in one transaction; a record's own key is made anew from what it is behind by then.
        """
        records = list(records)
        if records:
            self._drop(self._names.record(namespace, records, tenant, rules, self._expires_at(ttl_s)))

    def rehearse(
        self,
        namespace: str,
        records: Sequence[NodeRecord],
        *,
        rules: ReadingRules | None = None,
        ttl_s: float | None = None,
    ) -> list[NamedTarget]:
        """Return what `name` would lead to, without recording anything: the records, in their order, then the chunks of their
        documents whose keys would change.
        """
        return self._names.rehearse(namespace, records, rules, self._expires_at(ttl_s))

    def targets(self, namespace: str, ids: Sequence[str]) -> list[NamedTarget | None]:
        """Return how the KV of each name is computed; None where the name is unknown."""
        return self._names.targets(namespace, ids)

    def documents(self, namespace: str, ids: Sequence[str]) -> list[str | None]:
        """Return the document that each name is a piece of; None where it is one of none, or unknown."""
        return self._names.documents(namespace, ids)

    def document(self, namespace: str, document: str) -> list[str]:
        """Return the ids of a document's chunks in reading order."""
        return self._names.document(namespace, document)

    def document_tokens(self, namespace: str, document: str) -> tuple[int, ...]:
        """Return the tokens of a whole document; what overlaps stands there once, none where it is unknown."""
        return self._names.document_tokens(namespace, document)

    def lookup(self, namespace: str, ids: Sequence[str]) -> list[NodeRecord | None]:
        """Return the record of each id, or None where the name is unknown."""
        return self._names.lookup(namespace, ids)

    def forget(self, namespace: str, ids: Sequence[str]) -> int:
        """Remove names, and drop KV that loses its last name; return how many names there were."""
        return len(self._remove(namespace, ids)) if ids else 0

    def names(self, namespace: str) -> list[str]:
        """Return all ids of a namespace, in the order they were first recorded."""
        return self._names.names(namespace)

    def revision(self) -> int:
        """Return a number that every change to a name raises, by whatever process; equal numbers mean that no name changed."""
        return self._names.revision()

    def changes(self, namespace: str, since: int | None = None) -> NameChanges:
        """Return the names that changed since an earlier call, or all of them.

        Parameters
        ----------
        namespace : str
            Where the names are.
        since : int, optional
            The `mark` of the earlier call; by default all names are returned, and so they are if the call was too long ago.
        """
        return NameChanges(*self._names.changes(namespace, since), {})

    def pin(self, namespace: str, ids: Sequence[str]) -> None:
        """Never drop the KV of these names for room, now held or later.

        Raises
        ------
        UnknownChunkError
            If a name is unknown; nothing is pinned then.
        StoreFullError
            If more would be pinned than the disk's byte budget.
        """
        self._check()
        self._ram.pin(self._pin(namespace, ids, True))

    def unpin(self, namespace: str, ids: Sequence[str]) -> None:
        """Let the KV of these names be dropped for room again.

        Raises
        ------
        UnknownChunkError
            If a name is unknown; nothing is unpinned then.
        """
        self._check()
        self._pin(namespace, ids, False)
        self._unpin_copies()

    def clear(self, tenant: str | None = None) -> None:
        """Drop all KV and all names, or those of one tenant; "" is for what is no tenant's."""
        dropped = self._deleting(lambda: self._index.clear(tenant))
        if tenant is None:
            self._ram.clear()
            self._device.clear()
        else:
            self._drop_copies([*self._ram.keys(tenant), *self._device.keys(tenant)])
        self._drop(dropped)

    def tenants(self) -> list[str]:
        """Return the tenants that have KV or names; "" stands for what is no tenant's."""
        return self._index.tenants()

    def stats(self, tenant: str | None = None) -> StoreStats:
        """Return the store's figures, or one tenant's."""
        return StoreStats(
            nodes=self._index.share(tenant)[2],
            entries=len(self._ram.keys(tenant)),
            ram_bytes=self._ram.nbytes(tenant),
            disk_bytes=0,
            evictions=self.evictions,
            pinned_bytes=self._ram.pinned_bytes(),
            device_bytes=self._device.nbytes(tenant),
            ram_evictions=self._ram.evictions,
            device_evictions=self._device.evictions,
        )

    def close(self) -> None:
        """Write what waits, then release files and connections; further calls are errors. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        # What cannot be written was told as a warning.
        self.settle()
        if self._offsite:
            self._offsite.close()
        self._ram.clear()
        self._device.clear()
        self._release_files()

    # What differs with and without a folder

    @abstractmethod
    def _put(self, key: str, kv: ChunkKV, tenant: str, expires_at: float | None) -> None: ...

    @abstractmethod
    def _put_later(self, chunk: Computed) -> bool: ...

    def _send(self, key: str, kv: ChunkKV | PackedKV, expires_at: float | None) -> None:
        """Have what never expires uploaded to the remote tier."""
        if self._offsite and expires_at is None:
            self._offsite.put(key, kv)

    @abstractmethod
    def _hold(self, keys: Sequence[str], durable: bool) -> list[bool]:
        """Return for each key whether its KV is held here."""

    @abstractmethod
    def _end(self, key: str) -> float | None:
        """Return when the KV under a key is over, infinity for never; None where none is held here."""

    @abstractmethod
    def _bring_back(self, key: str, was_named: bool, kv: PackedKV) -> None:
        """Keep what was found in the remote tier alone, unless it lost its name meanwhile."""

    def _stays(self, key: str) -> bool:
        """Return whether a copy of what is under `key` may be on the device: slower tiers have not dropped it meanwhile."""
        cached = self._ram.peek(key)
        return cached is not None and not cached.hidden

    def _prolong(self, keys: Sequence[str], expires_at: float | None) -> None:
        for key in keys:
            self._ram.prolong(key, expires_at)
            self._device.prolong(key, expires_at)

    def _remove(self, namespace: str, ids: Sequence[str]) -> set[str]:
        found, dropped = self._deleting(lambda: self._names.remove(namespace, ids))
        self._drop(dropped)
        return found

    def _pin(self, namespace: str, ids: Sequence[str], pinned: bool) -> list[str]:
        return self._names.pin(namespace, ids, pinned)

    def _deleting(self, delete: Callable[[], Result]) -> Result:
        return delete()

    def _drop(self, dropped: Dropped) -> None:
        """Have every tier follow what a transaction has dropped."""
        self._drop_copies(dropped.keys)
        self._ram.pin(dropped.pinned)
        self._unpin_copies()
        if self._offsite and dropped.keys:
            self._offsite.drop(dropped.keys)

    def _release_files(self) -> None:
        self._database.close()

    # What does not

    def _check(self, key: str | None = None) -> None:
        if key is not None:
            valid_key(key)
        if self._closed:
            raise StoreError("the store is closed; open it again")

    def _expires_at(self, ttl_s: float | None) -> float | None:
        return None if ttl_s is None else self._clock.now() + ttl_s

    def _drop_copies(self, keys: Sequence[str]) -> None:
        # In this order: what rises to the device meanwhile looks into RAM once it is there.
        self._ram.drop(keys)
        self._device.drop(keys)

    def _unpin_copies(self) -> None:
        """Let go in RAM of what no pinned name leads to any more."""
        pinned = self._ram.pinned()
        if pinned:
            self._ram.unpin(set(pinned).difference(self._names.pinned(pinned)))

    def _promoting(
        self,
        key: str,
        source: ChunkFile | RamReader,
        tenant: str = "",
        expires_at: float | None = None,
        to_ram: Callable[[PackedKV], None] | None = None,
    ) -> KVReader:
        """Return a reader of what is under a key that brings it into faster tiers where it fits."""
        rises = self._device.limit_bytes > 0 and source.kv_bytes <= self._device.limit_bytes
        if to_ram is None and not rises:
            return source
        return PromotingReader(
            source,
            ram=self._ram if to_ram else None,
            to_ram=to_ram,
            device=self._device if rises else None,
            to_device=partial(self._keep_on_device, key, tenant, expires_at),
        )

    def _open_remote(self, key: str) -> KVReader | None:
        file = self._offsite.open(key) if self._offsite else None
        if file is None:
            return None
        was_named = self._names.leading_to(key) is not None
        return self._promoting(key, file, to_ram=partial(self._bring_back, key, was_named))

    def _keep_on_device(self, key: str, tenant: str, expires_at: float | None, kv: ResidentKV) -> None:
        """Keep a copy on its device, which nobody sees before it is clear that slower tiers have not dropped it meanwhile."""
        if cached := self._ram.peek(key):
            # Its life may have been prolonged since.
            tenant, expires_at = cached.tenant, cached.expires_at
        if not self._device.keep(key, kv, tenant, expires_at, hidden=True):
            return
        if self._stays(key):
            self._device.reveal(key)
        else:
            self._device.drop([key])


def end_of(expires_at: float | None) -> float:
    """Return when something is over, infinity for never."""
    return math.inf if expires_at is None else expires_at
