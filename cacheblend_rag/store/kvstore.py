"""The store as the engine sees it: names, and KV in the fastest tier that has it."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from cacheblend_rag.codec import PackedKV
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.reading import ReadingRules
from cacheblend_rag.store.base import Fate, KVReader, NodeRecord, StoreStats, TierProbe, count_of
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.device import DeviceTier, PromotingReader, ResidentKV, device_probe
from cacheblend_rag.store.folder import valid_key
from cacheblend_rag.store.index import Dropped, Index
from cacheblend_rag.store.names import Names, NamesSource, SharedNames
from cacheblend_rag.store.ram import RamReader, RamTier, Tie, ram_probe
from cacheblend_rag.store.remote.offsite import Offsite
from cacheblend_rag.store.waiting import Computed, WriteBack

__all__ = ["KVStore"]

Result = TypeVar("Result")


class KVStore(ABC):
    """Chunk KV under content keys, and the names by which chunks are looked up; `open_store` makes one.

    A key is a digest of everything the KV depends on (model, tokenizer, preamble, tokens) and of its owner (the tenant),
    made by the engine. Names (node ids) live in a namespace, the digest of the model and the tenant, and map to keys; several
    names may share one key. KV that no name maps to may be kept until room is needed. All methods may be called from any thread.

    A time to live, `ttl_s`, makes KV a miss once it is over; None is for ever. Of several times asked for the longest counts.
    Names stay.

    Nothing is on a device that is not in a slower tier too. The remote tier gets a copy of what is put, in the background, and
    keeps it when there is no more room here; what is found there alone is read from there, and kept here. Only KV without a time
    to live goes there.

    Attributes
    ----------
    path : Path or None
        The folder, if there is one and it may be written.
    is_private : bool
        Whether the store's contents end with this process and are reachable through this object alone.
    """

    path: Path | None = None
    is_private = False

    def __init__(
        self,
        index: Index,
        clock: Callable[[], float],
        ram: RamTier,
        device: DeviceTier,
        offsite: Offsite | None,
        write_back_bytes: int = 0,
    ) -> None:
        self._clock = clock
        self._ram = ram
        self._device = device
        self._offsite = offsite
        self._waiting = WriteBack(self._write, write_back_bytes)
        self._writes_at_once = not write_back_bytes
        self._index = index
        self._names = Names(index, clock, self._waiting)
        self._shared: SharedNames | None = None
        self._closed = False
        self._process = os.getpid()
        # The state of the names for which what is in RAM without one was looked through; None if there is no such thing.
        self._tied_at: int | None = None

    @property
    def names(self) -> Names:
        """The names, to be looked up; what changes them is a method of the store, which drops KV that loses its last name.

        Where machines share them they are as all have left them by now; `RemoteUnavailableError` if that cannot be seen.
        """
        if self._shared is not None:
            self._shared.catch_up()
        return self._names

    def follow(self, source: NamesSource) -> None:
        """Share names with other machines from now on; what they have done is read before this returns.

        Raises
        ------
        RemoteUnavailableError
            If they are out of reach.
        StoreError
            If the store has names already that were nobody else's.
        """
        self._names = self._shared = source(self._index, self._clock, self._waiting, self.path, self._drop)
        self._shared.catch_up()

    @property
    def follows_others(self) -> bool:
        """Whether the index is a copy of names that machines share, whoever follows them now."""
        return self._index.follows_others()

    def _changing(self, deed: Callable[[], Result]) -> Result:
        """Return what `deed` returns, which changes names; where machines share them, for all."""
        return deed() if self._shared is None else self._shared.change(deed)

    @property
    def is_closed(self) -> bool:
        """Whether it has been closed."""
        return self._closed

    @abstractmethod
    def evictions(self, tenant: str | None = None) -> int:
        """Return how many entries were dropped for room since the store was opened, as `stats` has it; cheap."""

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
            If the folder is not writable.
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
        chunk = Computed(key, kv, namespace, tenant, list(records), list(known), self._expires_at(ttl_s))
        if self._writes_at_once:
            try:
                self._write(chunk, wait=False)
                self._waiting.try_again()
                return True
            except StoreError:
                if not self._waiting.limit_bytes:
                    raise
        return self._waiting.put(chunk)

    def settle(self) -> None:
        """Wait until everything that waited to be written is, or has failed to be."""
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

    def cache(
        self,
        key: str,
        kv: ChunkKV | PackedKV,
        *,
        tenant: str = "",
        ttl_s: float | None = None,
        tied: tuple[str, str | None, str | None] | None = None,
    ) -> None:
        """Keep `kv` in RAM only, until room is needed; for KV that has no name by which it could be deleted.

        It may be `tied` to what is in a namespace: to an id, with which it goes, or when that stands for another text, or to a
        source, with whose last chunk it goes.
        """
        self._check(key)
        if tied is None:
            self._ram.put(key, kv, tenant, self._expires_at(ttl_s))
            return
        namespace, id, source = tied
        [record] = self._names.lookup(namespace, [id]) if id else [None]
        if id and record is None:
            # Deleted just now.
            return
        if id or (source and self._names.indexed(namespace, [source])):
            revision = self._names.revision()
            self._tied_at = revision if self._tied_at is None else self._tied_at
            self._ram.put(key, kv, tenant, self._expires_at(ttl_s))
            self._ram.tie(key, Tie(namespace, id, record.text_hash if record else None, None if id else source))
        else:
            self._ram.put(key, kv, tenant, self._expires_at(ttl_s))

    def holds(self, keys: Sequence[str], *, durable: bool = False) -> list[bool]:
        """Return for each key whether its KV is held; with `durable` what waits to be written does not count."""
        self._check()
        now = self._clock()
        waiting = [not durable and self._waiting.find(key, now) is not None for key in keys]
        held = [waits or here for waits, here in zip(waiting, self._hold(keys), strict=True)]
        if self._offsite and not all(held):
            elsewhere = iter(self._offsite.holds([key for key, here in zip(keys, held, strict=True) if not here]))
            held = [here or next(elsewhere) for here in held]
        return held

    def fates(self, keys: Sequence[str]) -> dict[str, Fate]:
        """Return why the KV under keys is not to be had, of those of which that is known; what is never held is not among them.

        Of what was dropped only the last few thousand are known.
        """
        self._check()
        if self._offsite and self._offsite.is_out:
            return dict.fromkeys(keys, "unreachable")
        return self._fates(keys)

    def lifetimes(self, keys: Sequence[str]) -> list[float | None]:
        """Return for how many seconds from now the KV under each key lives, infinity for ever; None where none is held here.

        What only a remote tier holds counts as not held.
        """
        self._check()
        now = self._clock()
        lives: list[float | None] = []
        for key in keys:
            held = self._waiting.find(key, now) or self._index.entry(key) or self._ram.peek(key)
            end = math.inf if held is None or held.expires_at is None else held.expires_at
            lives.append(None if held is None or end <= now else end - now)
        return lives

    def prolong(self, keys: Sequence[str], ttl_s: float | None) -> None:
        """Let KV that is held live for that long from now at least."""
        self._check()
        expires_at = self._expires_at(ttl_s)
        self._with_room(lambda: self._index.prolong(keys, expires_at))
        for key in keys:
            self._ram.prolong(key, expires_at)
            self._device.prolong(key, expires_at)

    def discard(self, key: str, wait: bool = True) -> None:
        """Drop the KV under `key`, damaged or not wanted any more; names stay.

        Where the store cannot be written, or without `wait` another one is writing, this object does not open it again.
        """
        self._check()
        self._waiting.drop(key=key)
        try:
            self._discard(key, wait)
        finally:
            self._drop_copies([key])
            if self._offsite:
                self._offsite.drop_later([key])

    def release(self, keys: Sequence[str]) -> None:
        """Drop the KV under those of the keys that no name maps to."""
        self._drop(self._with_room(lambda: self._names.release(keys)))

    def name(
        self,
        namespace: str,
        records: Iterable[NodeRecord],
        *,
        tenant: str = "",
        rules: ReadingRules | None = None,
        ttl_s: float | None = None,
        whole: bool = False,
    ) -> None:
        """Record names, replacing earlier records of the same ids; KV that loses its last name is dropped.

        Chunks with a place are put into their documents, which are then read by `rules`. So the keys of the chunks after them
        change too, all in one transaction; a record's own key is recomputed from its context at that time. What else there is in
        their documents is removed with it if the records are all that these have: if they are `whole`.
        """
        records = list(records)
        if records:
            expires_at = self._expires_at(ttl_s)
            change = partial(self._names.record, namespace, records, tenant, rules, expires_at, whole)
            # Their KV has no name until then.
            spared = {record.key for record in records}
            self._drop(self._changing(lambda: self._with_room(change, spared)))
            self._drop_tied()

    def forget(self, namespace: str, ids: Sequence[str], sources: Sequence[str] = ()) -> int:
        """Remove names, and drop KV that loses its last name; return how many names there were.

        With the last chunk that a vector store has of a source, one of the `sources` above all, what prompts brought of it goes
        too.
        """
        if not ids and not sources:
            return 0
        self._check()
        waited = self._waiting.forget(namespace, ids)
        waiting = self._waiting.records(namespace)
        remove = partial(self._names.remove, namespace, ids, sources)
        found, ended, dropped = self._changing(lambda: self._with_room(remove))
        self._drop(dropped)
        waiting |= self._waiting.records(namespace)
        late = [record.id for record in waiting.values() if record.source in ended]
        if late:
            waited |= self._waiting.forget(namespace, late)
            remove = partial(self._names.remove, namespace, late)
            gone, _, dropped = self._changing(lambda: self._with_room(remove))
            found |= gone
            self._drop(dropped)
        self._drop_tied()
        return len(waited | found)

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
        self.settle()
        self._ram.pin(self._with_room(lambda: self._names.pin(namespace, ids, True, self._limit_bytes)))

    def unpin(self, namespace: str, ids: Sequence[str]) -> None:
        """Let the KV of these names be dropped for room again.

        Raises
        ------
        UnknownChunkError
            If a name is unknown; nothing is unpinned then.
        """
        self._check()
        self.settle()
        self._with_room(lambda: self._names.pin(namespace, ids, False))
        self._unpin_copies()

    def clear(self, tenant: str | None = None) -> None:
        """Drop all KV and all names, or those of one tenant; "" is for what has no tenant."""
        self._waiting.drop(tenant=tenant)
        if self._shared is not None:
            for deed in self._shared.removals(tenant):
                self._drop(self._shared.change(partial(self._with_room, deed)))
        dropped = self._with_room(lambda: self._index.clear(tenant))
        if tenant is None:
            self._ram.clear()
            self._device.clear()
        else:
            self._drop_copies([*self._ram.keys(tenant), *self._device.keys(tenant)])
        self._drop(dropped)

    def tenants(self) -> list[str]:
        """Return the tenants that have KV or names; "" stands for what has no tenant."""
        return self._index.tenants()

    def stats(self, tenant: str | None = None) -> StoreStats:
        """Return the store's figures, or one tenant's."""
        self._follow()
        self._drop_tied()
        entries, nbytes, names = self._index.share(tenant)
        waiting, waiting_bytes = self._waiting.size(tenant)
        return StoreStats(
            nodes=names,
            entries=entries,
            ram_bytes=self._ram.nbytes(tenant),
            disk_bytes=nbytes,
            evictions=self.evictions(tenant),
            pinned_bytes=self._index.pinned_bytes(tenant),
            waiting=waiting,
            waiting_bytes=waiting_bytes,
            unwritten=count_of(self._waiting.refused, tenant),
            device_bytes=self._device.nbytes(tenant),
            ram_evictions=self._ram.evictions(tenant),
            device_evictions=self._device.evictions(tenant),
        )

    def close(self) -> None:
        """Write what waits, then release files and connections; further calls are errors. Closing twice does nothing."""
        if self._closed or self._process != os.getpid():
            # In a forked child it is the parent's.
            return
        self._closed = True
        # What cannot be written was told as a warning.
        self._waiting.close()
        if self._offsite:
            self._offsite.close()
        if self._shared is not None:
            self._shared.close()
        self._ram.clear()
        self._device.clear()
        self._release_files()

    # What differs with and without a folder

    _limit_bytes: int | None = None
    """Maximum bytes of KV that may be pinned."""

    @abstractmethod
    def _put(self, key: str, kv: ChunkKV, tenant: str, expires_at: float | None) -> None: ...

    @abstractmethod
    def _write(self, chunk: Computed, wait: bool = True) -> None:
        """Keep one chunk, its names and a remote copy, unless its last name is gone; it may `wait` for others who write."""

    @abstractmethod
    def _hold(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its KV is held here."""

    @abstractmethod
    def _fates(self, keys: Sequence[str]) -> dict[str, Fate]:
        """Return how those of the keys lost their KV here of which that is known."""

    @abstractmethod
    def _follow(self) -> None:
        """Drop the copies of what slower tiers have dropped."""

    def _stays(self, key: str) -> bool:
        """Return whether a copy of what is under `key` may be on the device: slower tiers have not dropped it meanwhile."""
        cached = self._ram.peek(key)
        return cached is not None and not cached.hidden

    def _discard(self, key: str, wait: bool) -> None:  # noqa: B027 - without a folder there are copies only
        """Drop the KV under `key` where it is not a copy."""

    def _with_room(self, write: Callable[[], Result], spared: Collection[str] = ()) -> Result:
        return write()

    def _drop(self, dropped: Dropped) -> None:
        """Have every tier follow what a transaction has dropped."""
        self._drop_copies(dropped.keys)
        self._ram.pin(dropped.pinned)
        self._unpin_copies()
        if self._offsite and dropped.keys:
            self._offsite.drop(dropped.keys)

    def _release_files(self) -> None:
        self._index.database.close()

    # What does not

    def _check(self, key: str | None = None) -> None:
        if key is not None:
            valid_key(key)
        self._index.database.check_open()

    def _send(self, key: str, kv: ChunkKV | PackedKV, expires_at: float | None) -> None:
        """Have what never expires uploaded to the remote tier."""
        if self._offsite and expires_at is None:
            self._offsite.put(key, kv)

    def _expires_at(self, ttl_s: float | None) -> float | None:
        return None if ttl_s is None else self._clock() + ttl_s

    def _drop_copies(self, keys: Sequence[str]) -> None:
        # In this order: what rises to the device meanwhile looks into RAM once it is there.
        self._ram.drop(keys)
        self._device.drop(keys)

    def _drop_tied(self) -> None:
        """Drop what is in RAM without a name, where what it goes with is gone, or stands for something else."""
        if self._tied_at is None or self._tied_at == (revision := self._names.revision()):
            return
        self._tied_at = revision
        gone = []
        for key, tie in self._ram.tied().items():
            [record] = self._names.lookup(tie.namespace, [tie.id]) if tie.id else [None]
            stays = (
                record is not None and record.text_hash == tie.text_hash
                if tie.id
                else self._names.indexed(tie.namespace, [tie.source or ""])
            )
            # What has come by a name since is computed again when it is next needed, and stored under that.
            if not self._hold([key])[0] if self._names.leading_to(key) else not stays:
                gone.append(key)
        self._drop_copies(gone)

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

    def _bring_back(self, key: str, was_named: bool, kv: PackedKV) -> None:
        """Keep what was found in the remote tier alone, unless it lost its name meanwhile."""
        named = None if self._closed else self._names.leading_to(key)
        if self._closed or (named is None and was_named):
            return
        if named is None or self._writes_at_once:
            self._ram.put(key, kv, "" if named is None else named[1])
        else:
            namespace, tenant, ids = named
            self._waiting.put(Computed(key, kv, namespace, tenant, [], ids, None, is_copy=True))

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
