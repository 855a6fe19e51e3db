"""The store as the engine sees it: names, and KV in the fastest tier that has it."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from logging import getLogger

from cacheblend_rag.codec import PackedKV
from cacheblend_rag.errors import StoreError, StoreFullError, StoreReadOnlyError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.background import Offsite, WorkQueue
from cacheblend_rag.store.base import Entry, Fate, KVReader, Later, NodeRecord, StoreStats, count_of
from cacheblend_rag.store.folder import valid_key
from cacheblend_rag.store.index import Dropped
from cacheblend_rag.store.memory import RamReader
from cacheblend_rag.store.names import Names, NamesSource, has_name
from cacheblend_rag.store.tiers import Tiers

__all__ = ["KVStore"]

_log = getLogger(__name__)

# Failures that are no further apart than this are one event, which is said once: a full disk may have room in between.
_EVENT_S = 60.0


class KVStore:
    """Chunk KV under content keys, and the names by which chunks are looked up; `open_store` makes one.

    A key is a digest of everything the KV depends on, and of its owner (the tenant). Names (ids of chunks) live in a namespace,
    the digest of the model and the tenant; several may lead to one key. KV lives for `ttl_s` seconds, None is for ever. All
    methods may be called from any thread.
    """

    def __init__(self, tiers: Tiers, offsite: Offsite | None = None, write_back_bytes: int = 0) -> None:
        self._index, self._tiers, self._offsite = tiers.index, tiers, offsite
        self._clock = tiers.clock
        self.is_private = tiers.disk is None and offsite is None
        self.outlives_process, self.path = tiers.disk is not None, tiers.path
        limit_bytes = write_back_bytes if self.path else 0
        self._waiting: WorkQueue[Entry] = WorkQueue(self._write, limit_bytes, "cacheblend-write-back")
        self._names = Names(tiers.index)
        self._closed = False
        self._process = os.getpid()
        # When KV of misses could not be stored last, why not, until `flush` tells it, and whose had no room to wait in.
        self._failed_at = -math.inf
        self._failure: StoreError | None = None
        self._refused: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"KVStore({'in memory' if self.path is None else str(self.path)!r})"

    @property
    def names(self) -> Names:
        """The names, to be looked up; where machines share them, as all have left them (`RemoteUnavailableError` if unknown)."""
        self._names.catch_up()
        return self._names

    def follow(self, source: NamesSource) -> None:
        """Share names with other machines from now on, none being here yet; what they have done is read before this returns."""
        self._names = source(self._index, self.path, self._drop)
        self._names.catch_up()

    @property
    def follows_others(self) -> bool:
        """Whether the index is a copy of names that machines share, whichever store follows them now."""
        return bool(self._index.rows("SELECT 1 FROM shared"))

    def open(self, key: str) -> KVReader | None:
        """Return a reader of the KV under `key`, which stays good when that is dropped; None if it is not held, or damaged."""
        valid_key(key)
        self._index.check_open()
        self._tiers.follow()
        if self._waiting.limit_bytes and (waiting := self._waits(key, self._clock())):
            return RamReader(waiting.kv)
        return self._tiers.get(key) or self._open_remote(key)

    def put(
        self, key: str, kv: ChunkKV, *, tenant: str = "", ttl_s: float | None = None, is_named: bool = False
    ) -> None:
        """Keep `kv` under `key`, on disk if there is a folder, unless that is held and sound; `StoreFullError` without room.

        KV that `is_named` is only kept while a name leads to it.
        """
        self._check(key)
        entry = Entry(tenant, self._expires_at(ttl_s), kv=kv)
        self._tiers.put(key, entry, partial(has_name, key) if is_named else None)
        if not is_named or self._names.leading_to(key) is not None:
            self._send(key, entry)

    def put_later(
        self,
        key: str,
        kv: ChunkKV | PackedKV,
        namespace: str,
        chunks: Mapping[str, Later | None],
        head: NodeRecord | None = None,
        *,
        tenant: str = "",
        ttl_s: float | None = None,
    ) -> bool:
        """Keep KV that was computed for an answer, of named `chunks` or of a `head`, in memory until it is written."""
        # The chunks led to it, or to no KV behind others. KV that no name leads to any more is not kept. If the index is not
        # writable, it is in RAM alone, and goes with the first of them.
        self._check(key)
        miss = Entry(tenant, self._expires_at(ttl_s), kv=kv)
        try:
            if not self._tiers.with_room(partial(self._names.note, namespace, tenant, key, chunks, head)):
                return True
        except StoreError as error:
            self._fail(error)
            ids = frozenset(chunks if head is None else [head.id])
            self._tiers.ram.keep(key, replace(miss, tied=(namespace, ids)))
            return True
        if not self._waiting.limit_bytes:
            self._write(key, miss)
            return True
        if self._waiting.put(key, miss, kv.nbytes):
            return True
        self._refused[tenant] += 1
        if self._refused.total() == 1:
            _log.warning(
                "KV of misses is computed faster than it is written; what exceeds write_back_bytes=%d is not stored "
                "(this warning is not repeated; the store's figures count it)",
                self._waiting.limit_bytes,
            )
        return False

    def settle(self) -> None:
        """Wait until everything that waited to be written is, or has failed to be."""
        self._waiting.settle()

    def flush(self) -> None:
        """Wait until everything that waited to be written or uploaded is; raise the first `StoreError` since the last call."""
        self.settle()
        if self._offsite:
            self._offsite.flush()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def cache(
        self,
        key: str,
        kv: ChunkKV | PackedKV,
        namespace: str,
        ids: Iterable[str] = (),
        *,
        tenant: str = "",
        ttl_s: float | None = None,
    ) -> None:
        """Keep `kv` that has no name in RAM, until one of the ids that it goes with is deleted or added with another text."""
        self._check(key)
        entry = Entry(tenant, self._expires_at(ttl_s), kv=kv, tied=(namespace, frozenset(ids)))
        self._tiers.ram.keep(key, entry)

    def holds(self, keys: Sequence[str], *, durable: bool = False) -> list[bool]:
        """Return for each key whether its KV is held; with `durable` what is not written, or never is, does not count."""
        self._check()
        now = self._clock()
        waiting = [not durable and self._waits(key, now) is not None for key in keys]
        held = [waits or here for waits, here in zip(waiting, self._tiers.holds(keys, durable), strict=True)]
        if self._offsite and not all(held):
            elsewhere = iter(self._offsite.holds([key for key, here in zip(keys, held, strict=True) if not here]))
            held = [here or next(elsewhere) for here in held]
        return held

    def fates(self, keys: Sequence[str]) -> dict[str, Fate]:
        """Return why the KV under keys is not to be had, of those of which that is known: the last few thousand."""
        self._check()
        if self._offsite and self._offsite.is_out:
            return dict.fromkeys(keys, "unreachable")
        return self._tiers.fates(keys)

    def lifetimes(self, keys: Sequence[str]) -> list[float | None]:
        """Return for how many seconds from now the KV under each key lives, infinity for ever; None where none is held here."""
        self._check()
        now = self._clock()
        lives: list[float | None] = []
        for key in keys:
            held = self._waits(key, now) or self._index.entry(key) or self._tiers.ram.peek(key)
            end = math.inf if held is None or held.expires_at is None else held.expires_at
            lives.append(None if held is None or end <= now else end - now)
        return lives

    def prolong(self, keys: Sequence[str], ttl_s: float | None) -> None:
        """Let KV that is held live for that long from now at least."""
        self._tiers.prolong(keys, self._expires_at(ttl_s))

    def discard(self, key: str, wait: bool = True) -> None:
        """Drop the KV under `key`; where others write and it is not to `wait`, or it is read-only, never open it again here."""
        self._check()
        self._waiting.cancel([key])
        try:
            self._tiers.discard(key, wait)
        finally:
            if self._offsite:
                self._offsite.drop_later([key])

    def name(
        self, namespace: str, records: Iterable[NodeRecord], *, tenant: str = "", whole: bool = False
    ) -> tuple[list[NodeRecord], set[str]]:
        """Record names in place of earlier ones of these ids, and drop KV that loses its last name.

        With `whole` they are all that their documents have. Return the records as they are by now, with what is known of their
        KV, and the ids that were not recorded so before.
        """
        records = list(records)
        if not records:
            return [], set()
        change = partial(self._names.record, namespace, records, tenant, whole)
        # Their KV has no name until then.
        spared = {record.key for record in records}
        found, changed, removed, dropped = self._names.change(lambda: self._tiers.with_room(change, spared))
        self._drop(dropped)
        self._drop_tied(namespace, changed | removed)
        return found, changed

    def choose(self, namespace: str, laters: Mapping[str, Later]) -> None:
        """Note what the KV of named chunks behind others is read behind."""
        if laters:
            choose = partial(self._names.choose, namespace, laters)
            self._names.change(lambda: self._tiers.with_room(choose))

    def forget(self, namespace: str, ids: Sequence[str]) -> int:
        """Remove names, and KV that loses its last one or goes with these ids; return how many names there were."""
        if not ids:
            return 0
        remove = partial(self._names.remove, namespace, ids)
        found, dropped = self._names.change(lambda: self._tiers.with_room(remove))
        self._drop(dropped)
        self._drop_tied(namespace, ids)
        return len(found)

    def clear(self, tenant: str | None = None) -> None:
        """Drop all KV and all names, or those of one tenant; "" is for what has no tenant."""
        self._waiting.cancel({key for key, miss, _ in self._waiting.items() if tenant in (None, miss.tenant)})
        if self._names.is_shared:
            for namespace in self.names.namespaces(tenant):
                self.forget(namespace, self._names.ids(namespace))
        dropped = self._tiers.with_room(lambda: self._index.clear(tenant))
        self._tiers.clear(tenant)
        self._drop(dropped)

    def tenants(self) -> list[str]:
        """Return the tenants that have KV or names; "" stands for what has no tenant."""
        return self._index.tenants()

    def stats(self, tenant: str | None = None) -> StoreStats:
        """Return the store's figures, or one tenant's."""
        self._tiers.follow()
        waiting = [nbytes for _, miss, nbytes in self._waiting.items() if tenant in (None, miss.tenant)]
        return replace(
            self._tiers.stats(tenant),
            waiting=len(waiting),
            waiting_bytes=sum(waiting),
            unwritten=count_of(self._refused, tenant),
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
        self._names.close()
        self._tiers.close()

    def _waits(self, key: str, now: float) -> Entry | None:
        """Return what waits to be written under a key and has not expired."""
        miss = self._waiting.get(key)
        return miss if miss is not None and miss.is_live(now) else None

    def _write(self, key: str, miss: Entry) -> None:
        """Store KV of a miss here and in the remote tier, unless its last name is gone; where that fails, it is kept in RAM."""
        try:
            try:
                self._tiers.put(key, miss, partial(has_name, key))
            except StoreFullError:
                if self._tiers.disk is not None:
                    raise
            if not miss.is_copy and self._names.leading_to(key) is not None:
                self._send(key, miss)
        except Exception as error:
            self._fail(error if isinstance(error, StoreError) else StoreError(f"KV was not written: {error!r}"))
            self._tiers.ram.keep(key, miss)
            with suppress(StoreError):
                if self._names.leading_to(key) is None:
                    self._tiers.drop([key])

    def _fail(self, error: StoreError) -> None:
        failed_at, self._failed_at = self._failed_at, time.monotonic()
        # Of a folder that is always read-only nothing more is to be said.
        if not isinstance(error, StoreReadOnlyError):
            self._failure = self._failure or error
        if self._failed_at - failed_at > _EVENT_S:
            _log.warning("the KV of a miss was not stored, and is kept in the memory of this process only: %s", error)

    def _drop(self, dropped: Dropped) -> None:
        """Have every tier follow what a transaction has dropped."""
        self._waiting.cancel(dropped.keys)
        self._tiers.drop(dropped.keys)
        if self._offsite and dropped.keys:
            self._offsite.drop(dropped.keys)

    def _check(self, key: str | None = None) -> None:
        if key is not None:
            valid_key(key)
        self._index.check_open()

    def _send(self, key: str, entry: Entry) -> None:
        """Have what never expires uploaded to the remote tier, unless it has been deleted meanwhile."""
        if self._offsite and entry.expires_at is None:
            self._offsite.put(key, entry.kv)
            if not self._tiers.holds([key])[0] and self._names.leading_to(key) is None:
                self._offsite.drop([key])

    def _expires_at(self, ttl_s: float | None) -> float | None:
        return None if ttl_s is None else self._clock() + ttl_s

    def _drop_tied(self, namespace: str, ids: Collection[str]) -> None:
        """Drop what is in RAM without a name, where what it goes with is gone, or stands for something else."""
        gone = self._tiers.ram.tied(namespace, ids)
        self._tiers.drop([key for key in gone if self._names.leading_to(key) is None])

    def _open_remote(self, key: str) -> KVReader | None:
        file = self._offsite.open(key) if self._offsite else None
        if file is None:
            return None
        was_named = self._names.leading_to(key) is not None
        return self._tiers.promoting(key, file, Entry(), partial(self._bring_back, key, was_named))

    def _bring_back(self, key: str, was_named: bool, kv: PackedKV) -> None:
        """Keep what was found in the remote tier alone, unless it lost its name meanwhile."""
        named = None if self._closed else self._names.leading_to(key)
        if self._closed or (named is None and was_named):
            return
        entry = Entry(named or "", kv=kv, is_copy=True)
        if named is None or not self._waiting.limit_bytes:
            self._tiers.ram.keep(key, entry)
        else:
            self._waiting.put(key, entry, kv.nbytes)
