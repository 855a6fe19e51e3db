"""What an engine shows of its store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cacheblend_rag.store import KVStore, StoreStats
from cacheblend_rag.store.stores import FolderStore

__all__ = ["TenantStore"]


class TenantStore:
    """What the tenant of an engine has in its store; of no other tenant it says or changes anything.

    The whole store is looked after with what `open_store` returns, and by the ``cacheblend-rag store`` commands.

    Parameters
    ----------
    store : KVStore
        The whole store.
    tenant : str
        Whose part this is; "" is for what has no tenant.
    namespace : str
        Where the engine's ids are.
    """

    def __init__(self, store: KVStore, tenant: str, namespace: str) -> None:
        self._store = store
        self._tenant = tenant
        self._namespace = namespace

    @property
    def path(self) -> Path | None:
        """The folder, if there is one and it may be written."""
        return self._store.path

    @property
    def outlives_process(self) -> bool:
        """Whether it is over a folder, which is there when this process has ended."""
        return isinstance(self._store, FolderStore)

    def stats(self) -> StoreStats:
        """Return figures of what the tenant has, for all models."""
        return self._store.stats(self._tenant)

    def holds(self, ids: Sequence[str]) -> list[bool]:
        """Return for each of the engine's ids whether its KV is stored; False where the id is unknown."""
        records = self._store.names.lookup(self._namespace, ids)
        held = iter(self._store.holds([record.key for record in records if record is not None]))
        return [record is not None and next(held) for record in records]

    def clear(self) -> None:
        """Drop all that the tenant has, KV and ids, for all models."""
        self._store.clear(self._tenant)
