"""The store as the engine sees it: names, and KV in the fastest tier that has it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from cacheblend_rag.codec import PackedKV
from cacheblend_rag.errors import StoreError, StoreFullError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.reading import ReadingRules
from cacheblend_rag.store.base import Fate, KVReader, NodeRecord, StoreStats, TierProbe, count_of
from cacheblend_rag.store.folder import valid_key
from cacheblend_rag.store.index import Dropped, Index
from cacheblend_rag.store.names import Names, NamesSource, SharedNames, name_computed
from cacheblend_rag.store.ram import RamReader
from cacheblend_rag.store.remote.offsite import Offsite
from cacheblend_rag.store.tiers import Tiers
from cacheblend_rag.store.waiting import Computed, WriteBack

__all__ = ["KVStore"]

Result = TypeVar("Result")

# Of so many texts without a name it is known what they go with; those of the oldest stay until RAM needs their room.
_TIES_KEPT = 4096


class KVStore:
    """Chunk KV under content keys, and the names by which chunks are looked up; `open_store` makes one.

    A key is a digest of everything the KV depends on (model, tokenizer, preamble, tokens) and of its owner (the tenant),
    made by the engine. Names (node ids) live in a namespace, the digest of the model and the tenant, and map to keys; several
    names may share one key. KV that no name maps to may be kept until room is needed. All methods may be called from any thread.

    A time to live, `ttl_s`, makes KV a miss once it is over; None is for ever. Of several times asked for the longest counts.
    Names stay.

    The remote tier gets a copy of what is put, in the background, and keeps it when there is no more room here; what is found
    there alone is read from there, and kept here. Only KV without a time to live goes there.

    Parameters
    ----------
    index : Index
        What is where, and the names.
    tiers : Tiers
        Where KV is held on this machine.
    offsite : Offsite, optional
        The remote tier.
    write_back_bytes : int
        Maximum bytes of KV of misses that wait to be written; with 0 they are written at once, and only what cannot be written
        waits, at most as much as RAM holds.

    Attributes
    ----------
    path : Path or None
        The folder, if there is one and it may be written.
    is_private : bool
        Whether the store's contents end with this process and are reachable through this object alone.
    """

    def __init__(self, index: Index, tiers: Tiers, offsite: Offsite | None = None, write_back_bytes: int = 0) -> None:
        self._index, self._tiers, self._offsite = index, tiers, offsite
        self._clock = tiers.clock
        self.is_private = tiers.disk is None and offsite is None
        self.path = tiers.path
        self._waiting = WriteBack(self._write, write_back_bytes or (tiers.ram.limit_bytes if tiers.disk else 0))
        self._writes_at_once = not write_back_bytes and (tiers.disk is None or tiers.path is not None)
        self._names = Names(index, tiers.clock, self._waiting)
        self._shared: SharedNames | None = None
        self._closed = False
        self._process = os.getpid()
        # What KV in RAM without a name goes with: a namespace, an id and a source.
        self._ties: dict[str, tuple[str, str | None, str | None]] = {}

    @property
    def outlives_process(self) -> bool:
        """Whether it is over a folder, which is there when this process has ended."""
        return self._tiers.disk is not None

    @property
    def names(self) -> Names:
        """The names, to be looked up; what changes them is a method of the store, which drops KV that loses its last name.

        Where machines share them they are as all have left them by now; `RemoteUnavailableError` if that cannot be seen.
        """
        if self._shared is not None:
            self._shared.catch_up()
        return self._names

    def lookup(self, namespace: str, ids: Sequence[str]) -> list[NodeRecord | None]:
        """Return the record of each id, or None where the name is unknown."""
        if self._shared is not None:
            self._shared.catch_up()
        return self._names.lookup(namespace, ids)

    def follow(self, source: NamesSource) -> None:
        """Share names with other machines from now on, none being here yet; what they have done is read before this returns."""
        self._names = self._shared = source(self._index, self._clock, self._waiting, self.path, self._drop)
        self._shared.catch_up()

    @property
    def follows_others(self) -> bool:
        """Whether the index is a copy of names that machines share, whoever follows them now."""
        return self._index.follows_others()

    def _changing(self, deed: Callable[[], Result]) -> Result:
        """Return what `deed` returns, which changes names; where machines share them, for all."""
        return deed() if self._shared is None else self._shared.change(deed)

    def evictions(self, tenant: str | None = None) -> int:
        """Return how many entries were dropped for room since the store was opened, as `stats` has it; cheap."""
        return self._tiers.evictions(tenant)

    def probes(self) -> list[TierProbe]:
        """Return what puts chunks into each tier only to measure how fast they are read."""
        return self._tiers.probes()

    def open(self, key: str) -> KVReader | None:
        """Return a reader of the KV under `key` and mark it as recently used, or None if it is not held.

        KV that is seen to be damaged is dropped with a warning, and None returned. A reader stays good when its KV is dropped.
        """
        valid_key(key)
        self._index.database.check_open()
        self._tiers.follow()
        waiting = self._waiting.find(key, self._clock()) if self._waiting.entries else None
        if waiting is not None:
            return RamReader(waiting.kv)
        return self._tiers.get(key) or self._open_remote(key)

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
        self._tiers.put(key, kv, tenant, expires_at)
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

        Of its names, nobody knew the `records`, which are recorded unless somebody has recorded them by then; those that were
        `known` led to it. Returns False if too much is waiting already; the KV is then not kept.
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
        """Wait until everything that waited to be written or uploaded is; raise the first `StoreError` since the last call."""
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

        It may be `tied` to what is in a namespace: to an id, or to a source, with whose last chunk it goes; where these are
        deleted or replaced through this object, it goes at once.
        """
        self._check(key)
        if tied is not None and tied[1] and self._names.lookup(tied[0], [tied[1]]) == [None]:
            # Deleted just now.
            return
        self._tiers.ram.put(key, kv, tenant, self._expires_at(ttl_s))
        if tied is not None:
            self._ties[key] = tied
            if len(self._ties) > _TIES_KEPT:
                self._ties.pop(next(iter(self._ties)), None)

    def holds(self, keys: Sequence[str], *, durable: bool = False) -> list[bool]:
        """Return for each key whether its KV is held; with `durable` what waits to be written does not count."""
        self._check()
        now = self._clock()
        waiting = [not durable and self._waiting.find(key, now) is not None for key in keys]
        held = [waits or here for waits, here in zip(waiting, self._tiers.holds(keys), strict=True)]
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
        return self._tiers.fates(keys)

    def lifetimes(self, keys: Sequence[str]) -> list[float | None]:
        """Return for how many seconds from now the KV under each key lives, infinity for ever; None where none is held here.

        What only a remote tier holds counts as not held.
        """
        self._check()
        now = self._clock()
        lives: list[float | None] = []
        for key in keys:
            held = self._waiting.find(key, now) or self._index.entry(key) or self._tiers.ram.peek(key)
            end = math.inf if held is None or held.expires_at is None else held.expires_at
            lives.append(None if held is None or end <= now else end - now)
        return lives

    def prolong(self, keys: Sequence[str], ttl_s: float | None) -> None:
        """Let KV that is held live for that long from now at least."""
        self._check()
        self._tiers.prolong(keys, self._expires_at(ttl_s))

    def discard(self, key: str, wait: bool = True) -> None:
        """Drop the KV under `key`, damaged or not wanted any more; names stay.

        Where the store cannot be written, or without `wait` another one is writing, this object does not open it again.
        """
        self._check()
        self._waiting.drop(key=key)
        try:
            self._tiers.discard(key, wait)
        finally:
            if self._offsite:
                self._offsite.drop_later([key])

    def release(self, keys: Sequence[str]) -> None:
        """Drop the KV under those of the keys that no name maps to."""
        self._drop(self._tiers.with_room(lambda: self._names.release(keys)))

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
            spared, ids = {record.key for record in records}, {record.id for record in records}
            self._drop(self._changing(lambda: self._tiers.with_room(change, spared)))
            self._drop_tied(namespace, ids)

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
        found, ended, dropped = self._changing(lambda: self._tiers.with_room(remove))
        self._drop(dropped)
        waiting |= self._waiting.records(namespace)
        late = [record.id for record in waiting.values() if record.source in ended]
        if late:
            waited |= self._waiting.forget(namespace, late)
            remove = partial(self._names.remove, namespace, late)
            gone, _, dropped = self._changing(lambda: self._tiers.with_room(remove))
            found |= gone
            self._drop(dropped)
        self._drop_tied(namespace, waited | found | set(ids), ended)
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
        limit_bytes = None if self._tiers.disk is None else self._tiers.disk.limit_bytes
        self._tiers.ram.pin(self._tiers.with_room(lambda: self._names.pin(namespace, ids, True, limit_bytes)))

    def unpin(self, namespace: str, ids: Sequence[str]) -> None:
        """Let the KV of these names be dropped for room again; `UnknownChunkError` as for `pin`."""
        self._check()
        self.settle()
        self._tiers.with_room(lambda: self._names.pin(namespace, ids, False))
        self._tiers.unpin()

    def clear(self, tenant: str | None = None) -> None:
        """Drop all KV and all names, or those of one tenant; "" is for what has no tenant."""
        self._waiting.drop(tenant=tenant)
        if self._shared is not None:
            for deed in self._shared.removals(tenant):
                self._drop(self._shared.change(partial(self._tiers.with_room, deed)))
        dropped = self._tiers.with_room(lambda: self._index.clear(tenant))
        self._tiers.clear(tenant)
        self._drop(dropped)

    def tenants(self) -> list[str]:
        """Return the tenants that have KV or names; "" stands for what has no tenant."""
        return self._index.tenants()

    def stats(self, tenant: str | None = None) -> StoreStats:
        """Return the store's figures, or one tenant's."""
        self._tiers.follow()
        waiting, waiting_bytes = self._waiting.size(tenant)
        return replace(
            self._tiers.stats(tenant),
            waiting=waiting,
            waiting_bytes=waiting_bytes,
            unwritten=count_of(self._waiting.refused, tenant),
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
        self._ties.clear()
        self._tiers.close()

    def _write(self, chunk: Computed, wait: bool = True) -> None:
        """Keep one chunk, its names and a remote copy, unless its last name is gone; it may `wait` for others who write."""
        key, wanted = chunk.key, partial(name_computed, chunk)
        try:
            self._tiers.put(key, chunk.kv, chunk.tenant, chunk.expires_at, wanted, wait)
        except StoreFullError:
            if self._tiers.disk is not None:
                raise
        if not chunk.is_copy and self._names.leading_to(key) is not None:
            self._send(key, chunk.kv, chunk.expires_at)

    def _drop(self, dropped: Dropped) -> None:
        """Have every tier follow what a transaction has dropped."""
        self._tiers.drop(dropped.keys)
        self._tiers.ram.pin(dropped.pinned)
        self._tiers.unpin()
        if self._offsite and dropped.keys:
            self._offsite.drop(dropped.keys)

    def _check(self, key: str | None = None) -> None:
        if key is not None:
            valid_key(key)
        self._index.database.check_open()

    def _send(self, key: str, kv: ChunkKV | PackedKV, expires_at: float | None) -> None:
        """Have what never expires uploaded to the remote tier, unless it has been deleted meanwhile."""
        if self._offsite and expires_at is None:
            self._offsite.put(key, kv)
            if not self._tiers.holds([key])[0] and self._names.leading_to(key) is None:
                self._offsite.drop([key])

    def _expires_at(self, ttl_s: float | None) -> float | None:
        return None if ttl_s is None else self._clock() + ttl_s

    def _drop_tied(self, namespace: str, ids: Collection[str], sources: Collection[str] = ()) -> None:
        """Drop what is in RAM without a name, where what it goes with is gone, or stands for something else."""
        gone = [
            key
            for key, (space, id, source) in list(self._ties.items())
            if space == namespace and (id in ids if id else source in sources)
        ]
        for key in gone:
            self._ties.pop(key, None)
        self._tiers.drop([key for key in gone if self._names.leading_to(key) is None])

    def _open_remote(self, key: str) -> KVReader | None:
        file = self._offsite.open(key) if self._offsite else None
        if file is None:
            return None
        was_named = self._names.leading_to(key) is not None
        return self._tiers.promoting(key, file, to_ram=partial(self._bring_back, key, was_named))

    def _bring_back(self, key: str, was_named: bool, kv: PackedKV) -> None:
        """Keep what was found in the remote tier alone, unless it lost its name meanwhile."""
        named = None if self._closed else self._names.leading_to(key)
        if self._closed or (named is None and was_named):
            return
        if named is None or self._writes_at_once:
            self._tiers.ram.put(key, kv, "" if named is None else named[1])
        else:
            namespace, tenant, ids = named
            self._waiting.put(Computed(key, kv, namespace, tenant, [], ids, None, is_copy=True))
