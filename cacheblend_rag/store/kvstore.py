"""The store: names, and KV in the fastest tier that has it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from typing import Any, TypeVar

from cacheblend_rag.codec import Codec, PackedKV, pack_kv
from cacheblend_rag.errors import StoreError, StoreFullError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.index import Index, valid_key
from cacheblend_rag.store.memory import Entry, KVReader, PromotingReader, RamReader, RamTier, packed_kv
from cacheblend_rag.store.names import Later, Names, NamesSource, NodeRecord
from cacheblend_rag.store.remote import RemoteTier
from cacheblend_rag.store.tiers import DiskTier, Offsite

__all__ = ["KVStore", "StoreStats"]

_log = getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Figures of a store, or of what one tenant has in it; evictions count since the store was opened.

    Attributes
    ----------
    nodes, entries : int
        Named chunks of all models, and chunks whose KV is held.
    ram_bytes, disk_bytes : int
        Bytes of KV in RAM, and of files on disk.
    evictions, ram_evictions : int
        Entries dropped for room, and copies dropped for room in RAM. Without a folder both count what is dropped from RAM.
    """

    nodes: int
    entries: int
    ram_bytes: int
    disk_bytes: int
    evictions: int
    ram_evictions: int


class KVStore:
    """Chunk KV under content keys, and the names by which chunks are looked up; `open_store` makes one.

    A key is a digest of everything the KV depends on, and of its owner (the tenant). Names (ids of chunks) live in a namespace,
    the digest of the model and the tenant; several may lead to one key. All methods may be called from any thread.

    KV is on disk, with copies in RAM, each of which is served only while the disk has it, so that no deletion, by any process,
    leaves a copy; without a disk RAM has all of it, and the remote tier gets it packed by `codec`.
    """

    def __init__(
        self,
        ram: RamTier,
        disk: DiskTier | None,
        codec: Codec,
        remote: RemoteTier | None = None,
        source: NamesSource | None = None,
    ) -> None:
        self._ram, self._disk, self._codec = ram, disk, codec
        self._index = Index() if disk is None else disk.index
        self._offsite = None if remote is None else Offsite(remote, self._packed)
        self.is_private = disk is None and remote is None
        self.outlives_process = disk is not None
        self.path = None if disk is None else disk.path
        self._writer = ThreadPoolExecutor(1, "cacheblend-write-back")
        self._process, self._closed = os.getpid(), False
        # Why KV of misses could not be stored, until `flush` tells it.
        self._failure: StoreError | None = None
        self._names = Names(self._index)
        try:
            if source is not None:
                self._names = source(self._index, self.path, self._drop)
                self._names.catch_up()
            elif self._index.rows("SELECT 1 FROM shared"):
                raise StoreError(
                    f"the ids in {self.path} are shared with other machines, and out of date without their server; give its "
                    "address (EngineConfig(names=...), or CACHEBLEND_NAMES in the environment)"
                )
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"KVStore({'in memory' if self.path is None else str(self.path)!r})"

    @property
    def names(self) -> Names:
        """The names, to be looked up; where machines share them, as all have left them (`RemoteUnavailableError` if unknown)."""
        self._names.catch_up()
        return self._names

    def open(self, key: str) -> KVReader | None:
        """Return a reader of the KV under `key`, which stays good when that is dropped; None if it is not held, or damaged."""
        found = self._find(valid_key(key))
        if isinstance(found, Entry):
            return RamReader(found.kv)
        if found is not None:
            file, tenant = found
            keep = partial(self._keep_copy, key, tenant)
            return PromotingReader(file, self._ram.codec, keep) if file.kv_bytes <= self._ram.limit_bytes else file
        remote = self._offsite.open(key) if self._offsite else None
        if remote is None:
            return None
        was_named = self._names.leading_to(key) is not None
        return PromotingReader(remote, self._ram.codec, partial(self._bring_back, key, was_named))

    def put(self, key: str, kv: ChunkKV | PackedKV, *, tenant: str = "", sends: bool = True) -> None:
        """Keep `kv`, on disk if there is a folder, while a name leads to `key`, and upload it; `StoreFullError` without room."""
        self._check(key)
        if self._disk is not None:
            # RAM gets what the disk gives back, so that an answer is the same before and after a restart.
            kv = pack_kv(kv, self._disk.codec)
            self._ram.drop(self._disk.put(key, kv, tenant))
            self._keep_copy(key, tenant, kv)
        else:
            has_room = self._ram.keep(key, kv, tenant)
            self._drop_nameless([key])
            if not has_room:
                raise StoreFullError(
                    f"a chunk of {pack_kv(kv, self._ram.codec).nbytes} bytes exceeds the store's budget of "
                    f"{self._ram.limit_bytes} bytes (ram_bytes)"
                )
        if self._offsite and sends:
            self._offsite.put(key)

    def put_later(
        self,
        key: str,
        kv: ChunkKV | PackedKV,
        namespace: str,
        chunks: Mapping[str, Later | None],
        head: NodeRecord | None = None,
        *,
        tenant: str = "",
    ) -> None:
        """Keep KV that was computed for an answer, of named `chunks` or of a `head`, in RAM, and have it written."""
        # The chunks led to it, or to no KV behind others. KV that no name leads to any more is not kept. If the index is not
        # writable, it is in RAM alone, and goes with the first of them.
        self._check(key)
        try:
            if not self._with_room(partial(self._names.note, namespace, tenant, key, chunks, head)):
                return
        except StoreError as error:
            self._fail(error)
            self._ram.keep(key, kv, tenant, tied=(namespace, frozenset(chunks if head is None else [head.id])))
            return
        self._write_later(key, kv, tenant)

    def cache(
        self, key: str, kv: ChunkKV | PackedKV, namespace: str, ids: Iterable[str] = (), *, tenant: str = ""
    ) -> None:
        """Keep `kv` that has no name in RAM, until one of the ids that it goes with is deleted or added with another text."""
        self._check(key)
        self._ram.keep(key, kv, tenant, tied=(namespace, frozenset(ids)))

    def settle(self) -> None:
        """Wait until everything that waited to be written is, or has failed to be."""
        if not self._closed:
            self._check()
            with suppress(RuntimeError):  # Python ends
                self._writer.submit(int).result()

    def flush(self) -> None:
        """Wait until everything that waited to be written or uploaded is; raise the first `StoreError` since the last call."""
        self.settle()
        if self._offsite:
            self._offsite.flush()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def holds(self, keys: Sequence[str], *, durable: bool = False) -> list[bool]:
        """Return for each key whether its KV is held; with `durable` what is not written, or never is, does not count."""
        self._check()
        held = [False] * len(keys) if self._disk is None else self._disk.holds(keys)
        if self._disk is None or not durable:
            cached = map(self._ram.peek, keys)
            held = [here or (entry is not None and not entry.is_copy) for here, entry in zip(held, cached, strict=True)]
        if self._offsite and not all(held):
            elsewhere = iter(self._offsite.holds([key for key, here in zip(keys, held, strict=True) if not here]))
            held = [here or next(elsewhere) for here in held]
        return held

    def discard(self, key: str, wait: bool = True) -> None:
        """Drop the KV under `key`; where others write and it is not to `wait`, never open it again here."""
        self._check()
        try:
            if self._disk is not None:
                self._disk.discard(key, wait)
        finally:
            self._ram.drop([key])
            if self._offsite:
                self._offsite.drop([key], wait=False)

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
        found, changed, removed, dropped = self._change(self._names.record, namespace, records, tenant, whole)
        self._drop(dropped, namespace, changed | removed)
        return found, changed

    def choose(self, namespace: str, laters: Mapping[str, Later]) -> None:
        """Note what the KV of named chunks behind others is read behind."""
        if laters:
            self._change(self._names.choose, namespace, laters)

    def forget(self, namespace: str, ids: Sequence[str]) -> int:
        """Remove names, and KV that loses its last one or goes with these ids; return how many names there were."""
        if not ids:
            return 0
        found, dropped = self._change(self._names.remove, namespace, ids)
        self._drop(dropped, namespace, ids)
        return len(found)

    def clear(self, tenant: str | None = None) -> None:
        """Drop all KV and all names, or those of one tenant; "" is for what has no tenant."""
        if self._names.is_shared:
            for namespace in self.names.namespaces(tenant):
                self.forget(namespace, self._names.ids(namespace))
        dropped = self._with_room(lambda: self._index.clear(tenant))
        self._drop([*dropped, *self._ram.keys(tenant)])

    def tenants(self) -> list[str]:
        """Return the tenants that have KV or names; "" stands for what has no tenant."""
        return self._index.tenants()

    def stats(self, tenant: str | None = None) -> StoreStats:
        """Return the store's figures, or one tenant's."""
        if self._disk is not None:
            # What other processes have dropped goes here too.
            copies = self._ram.keys(copies=True)
            self._ram.drop(key for key, held in zip(copies, self._disk.holds(copies), strict=True) if not held)
        entries, nbytes, names = self._index.share(tenant)
        ram, disk = (
            counts.total() if tenant is None else counts[tenant]
            for counts in (self._ram.evicted, self._ram.evicted if self._disk is None else self._disk.evicted)
        )
        entries = len(self._ram.keys(tenant)) if self._disk is None else entries
        return StoreStats(names, entries, self._ram.nbytes(tenant), nbytes, disk, ram)

    def close(self) -> None:
        """Write what waits, then release files and connections; further calls are errors. Closing twice does nothing."""
        if self._closed or self._process != os.getpid():
            # In a forked child it is the parent's.
            return
        self._closed = True
        # What cannot be written was told as a warning.
        self._writer.shutdown()
        if self._offsite:
            self._offsite.close()
        self._names.close()
        self._ram.drop(self._ram.keys())
        if self._disk is None:
            self._index.close()
        else:
            self._disk.close()

    def _check(self, key: str | None = None) -> None:
        if key is not None:
            valid_key(key)
        self._index.check_open()

    def _with_room(self, write: Callable[[], Result]) -> Result:
        return write() if self._disk is None else self._disk.with_room(write)

    def _change(self, write: Callable[..., Result], *arguments: Any) -> Result:
        """Change names, in all machines that share them."""
        return self._names.change(lambda: self._with_room(partial(write, *arguments)))

    def _find(self, key: str) -> Entry | tuple[ChunkFile, str] | None:
        """Return what is held here under a key, from RAM or disk, and mark it as used."""
        self._check()
        entry = self._ram.get(key)
        if self._disk is None or (entry is not None and not entry.is_copy):
            return entry
        if entry is not None and self._index.tenant_of(key) is not None:
            self._disk.touch(key)
            return entry
        self._ram.drop([key])
        return self._disk.find(key)

    def _packed(self, key: str) -> PackedKV | None:
        """Return what is held here under a key as the remote tier gets it."""
        if self._disk is not None:
            found = self._disk.find(key)
            return None if found is None else packed_kv(found[0])
        entry = self._ram.peek(key)
        return None if entry is None else pack_kv(entry.kv, self._codec)

    def _keep_copy(self, key: str, tenant: str, kv: PackedKV) -> None:
        """Keep in RAM what is on disk, unless it was dropped there meanwhile, or the store is closed."""
        assert self._disk is not None
        with suppress(StoreError):
            if self._disk.holds([key])[0]:
                self._ram.keep(key, kv, tenant, is_copy=True)
                return
        self._ram.drop([key])

    def _bring_back(self, key: str, was_named: bool, kv: PackedKV) -> None:
        """Keep what was found in the remote tier alone, unless it lost its name meanwhile; on disk if it has one."""
        with suppress(StoreError):
            tenant = self._names.leading_to(key)
            if tenant is not None and self._disk is not None:
                self._write_later(key, kv, tenant, sends=False)
            elif tenant is not None or not was_named:
                self._ram.keep(key, kv, tenant or "")

    def _write_later(self, key: str, kv: ChunkKV | PackedKV, tenant: str, sends: bool = True) -> None:
        """Keep KV of a miss in RAM until it is written; what has no room there is written at once."""
        if self._disk is not None and self._ram.keep(key, kv, tenant, waits=True):
            with suppress(RuntimeError):  # Python ends, and starts no threads any more
                self._writer.submit(self._write, key, None, tenant, sends)
                return
        self._write(key, kv, tenant, sends)

    def _write(self, key: str, kv: ChunkKV | PackedKV | None, tenant: str, sends: bool) -> None:
        """Store KV of a miss, or what waits in RAM; where that fails, it is kept there as long as it has a name."""
        if kv is None:
            entry = self._ram.peek(key)
            if entry is None or entry.is_copy:
                # It was deleted meanwhile.
                return
            kv = entry.kv
        try:
            self.put(key, kv, tenant=tenant, sends=sends)
        except Exception as error:
            if self._disk is None and isinstance(error, StoreFullError):
                return
            self._fail(error if isinstance(error, StoreError) else StoreError(f"KV was not written: {error!r}"))
            self._ram.keep(key, kv, tenant)
            with suppress(StoreError):
                self._drop_nameless([key])

    def _drop_nameless(self, keys: Iterable[str]) -> None:
        self._ram.drop([key for key in keys if self._names.leading_to(key) is None])

    def _fail(self, error: StoreError) -> None:
        if self._failure is None:
            _log.warning("the KV of a miss was not stored, and is kept in the memory of this process only: %s", error)
        self._failure = self._failure or error

    def _drop(self, keys: Collection[str], namespace: str = "", ids: Collection[str] = ()) -> None:
        """Have every tier follow what a transaction has dropped, and RAM what goes with ids that are gone, or changed."""
        self._ram.drop(keys)
        if self._offsite and keys:
            self._offsite.drop(keys)
        self._drop_nameless(self._ram.tied(namespace, ids))
