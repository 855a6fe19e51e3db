"""The store as an engine has it: on the way to an answer, as what its tenant has in it, and beside a vector store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

from cacheblend_rag.chunk import is_part
from cacheblend_rag.codec import PackedKV
from cacheblend_rag.engine.protocol import Library
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store import KVReader, KVStore, NodeRecord, StoreStats

__all__ = ["AnsweringStore", "ChunkCollection", "TenantStore"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Present = Callable[[Sequence[str]], "Collection[str] | None"]

# Names that a vector store is asked for at once.
_BATCH = 1000


class AnsweringStore:
    """What an answer asks of a store, and hands to it; a call that fails has found nothing, and none waits for who writes."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.failures = 0
        self._lock = threading.Lock()
        self._failing: set[str] = set()

    def lookup(self, namespace: str, ids: Sequence[str]) -> list[NodeRecord | None] | None:
        """Return the record of each id; None where they cannot be read."""
        return self._ask(None, "names", lambda: self.store.names.lookup(namespace, ids))

    def members(self, namespace: str, document: str | None) -> list[NodeRecord]:
        """Return the chunks of a document in reading order; none where they cannot be read, or a chunk is of none."""
        return [] if document is None else self._ask([], "names", lambda: self.store.names.members(namespace, document))

    def open(self, key: str) -> KVReader | None:
        return self._ask(None, "open", self.store.open, key)

    def holds(self, keys: Sequence[str]) -> list[bool]:
        return self._ask([False] * len(keys), "holds", self.store.holds, keys)

    def put_later(self, key: str, kv: ChunkKV | PackedKV, *names: Any, **owner: Any) -> None:
        self._ask(None, "put", self.store.put_later, key, kv, *names, **owner)

    def cache(self, key: str, kv: ChunkKV | PackedKV, *ids: Any, **owner: Any) -> None:
        self._ask(None, "cache", self.store.cache, key, kv, *ids, **owner)

    def discard(self, key: str) -> None:
        """Drop stored KV that is damaged or not what it is stored for; it is a miss from now on."""
        try:
            self.store.discard(key, wait=False)
        except StoreError as error:
            # It is not opened again; what is put in its place replaces it.
            logger.debug("stored KV %s… is only ignored: %s", key[:12], error)

    def _ask(self, nothing: Result, what: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Result:
        try:
            found: Result = call(*arguments, **options)
        except StoreError as error:
            with self._lock:
                is_first = not self._failing
                self._failing.add(what)
                self.failures += 1
            if is_first:
                logger.warning("the store cannot be used now, so stored chunks are computed: %s", error)
            return nothing
        if what in self._failing:
            with self._lock:
                self._failing.discard(what)
        return found


class TenantStore:
    """What the tenant of an engine has in its store; of no other tenant it says or changes anything.

    The whole store is looked after with what `open_store` returns, and by the ``cacheblend-rag store`` commands.

    Attributes
    ----------
    path : Path or None
        The folder, if there is one and it may be written.
    outlives_process : bool
        Whether it is over a folder, which is there when this process has ended.
    """

    def __init__(self, store: KVStore, tenant: str, namespace: str) -> None:
        self.path: Path | None = store.path
        self.outlives_process = store.outlives_process
        self._store, self._tenant, self._namespace = store, tenant, namespace

    def stats(self) -> StoreStats:
        """Return figures of what the tenant has, for all models."""
        return self._store.stats(self._tenant)

    def holds(self, ids: Sequence[str]) -> list[bool]:
        """Return for each of the engine's ids whether its KV is stored; False where the id is unknown."""
        records = self._store.names.lookup(self._namespace, ids)
        keys = [key for record in records if record is not None for key in record.keys]
        held = dict(zip(keys, self._store.holds(keys), strict=True))
        return [record is not None and all(held[key] for key in record.keys) for record in records]

    def clear(self) -> None:
        """Drop all that the tenant has, KV and ids, for all models."""
        self._store.clear(self._tenant)


class ChunkCollection:
    """The chunks of a library that a vector store has.

    Parameters
    ----------
    library : Library
        The library.
    present : callable
        Returns those of some ids that the vector store has; None if it cannot say.
    """

    _living: ClassVar[WeakSet[ChunkCollection]] = WeakSet()

    def __init__(self, library: Library, present: Present) -> None:
        self._library = library
        self._present = present
        self._living.add(self)

    def sync(self, ids: Iterable[str], *, deleted: bool = False) -> int:
        """Forget those of some ids that no vector store of this process has, and return how many.

        What was `deleted` from this one goes even if others cannot say whether they have it.
        """
        return self._library.delete(self.absent(ids, deleted=deleted))

    def absent(self, ids: Iterable[str], *, deleted: bool = False) -> list[str]:
        """Return the ids that `sync` forgets."""
        if self._library.is_shared and not deleted:
            # Other processes fill it too.
            return []
        stores = [each for each in list(self._living) if each._library is self._library]
        found: list[str] = []
        try:
            ids = [id for id in dict.fromkeys(ids) if not is_part(id)]
            for start in range(0, len(ids), _BATCH):
                left = ids[start : start + _BATCH]
                for each in stores:
                    held = () if deleted and each is self else each._present(left)
                    if held is None and not deleted:
                        return found
                    left = [id for id in left if id not in set(held or ())]
                found += left
        except Exception as error:  # whatever a vector store raises, and an engine that was closed meanwhile
            if deleted:
                raise
            logger.debug("the vector store does not say which ids it still has: %s", error)
        return found
