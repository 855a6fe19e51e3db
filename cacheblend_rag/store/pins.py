"""Pinning chunks of a store folder, whichever models they were encoded for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cacheblend_rag.store.collect import existing_store
from cacheblend_rag.store.disk import DiskTier
from cacheblend_rag.store.names import Names, check_known

__all__ = ["pin_chunks"]


def pin_chunks(location: str | Path, ids: Sequence[str], *, pinned: bool = True, tenant: str | None = None) -> int:
    """Pin chunks of every model that knows their ids, or unpin them. Other processes may go on using the store.

    No byte budget is asked for here: a process that opens the store with one finds pinned KV in the way of what it adds.

    Parameters
    ----------
    location : str or Path
        The store's folder.
    ids : sequence of str
        The chunks' ids.
    pinned : bool
        Whether their KV is to be kept, or may be evicted again.
    tenant : str, optional
        Only what is this tenant's; "" is for what is no tenant's.

    Returns
    -------
    int
        Bytes of KV on disk that are pinned now, in the whole store.

    Raises
    ------
    UnknownChunkError
        If nobody knows an id; nothing is changed then.
    StoreReadOnlyError
        If the folder may not be written.
    StoreError
        If the folder is no store.
    """
    tier = DiskTier(existing_store(location).path, None)
    try:
        names = Names(tier.database)
        spaces = names.spaces_of(ids, tenant)
        check_known(ids, {node for known in spaces.values() for node in known})
        for namespace, known in spaces.items():
            names.pin(namespace, known, pinned, None)
        return tier.index.pinned_bytes()
    finally:
        tier.close()
