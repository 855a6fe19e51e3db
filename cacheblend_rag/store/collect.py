"""Maintenance of a store folder: removing what nobody can use any more, and pinning what is to stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from cacheblend_rag.store.disk import DiskTier, existing_store
from cacheblend_rag.store.index import Dropped
from cacheblend_rag.store.names import Names, check_known

__all__ = ["GarbageReport", "collect_garbage", "pin_chunks"]

# Entries dropped in one transaction: others wait no longer than that takes.
_AT_ONCE = 500


@dataclass(slots=True)
class GarbageReport:
    """What was removed from a store.

    Attributes
    ----------
    expired : int
        Entries whose time was over.
    unnamed : int
        Entries that no name led to: those that a killed ingestion left, and others if asked for.
    orphans : int
        Files that belonged to no entry.
    freed_bytes : int
        Size of the files removed.
    index_bytes : int
        How many bytes smaller the index and its log are than before; negative if they are larger.
    """

    expired: int = 0
    unnamed: int = 0
    orphans: int = 0
    freed_bytes: int = 0
    index_bytes: int = 0


def collect_garbage(
    location: str | Path, unnamed_age_s: float | None = None, clock: Callable[[], float] | None = None
) -> GarbageReport:
    """Remove expired KV, files that belong to nothing, and what killed processes left, and give unused room back to the disk.

    Other processes may go on using the store.

    Parameters
    ----------
    location : str or Path
        The folder.
    unnamed_age_s : float, optional
        Also remove KV that was added at least this long ago and has no name. By default it is kept until room is needed.
    clock : callable
        Returns the time in seconds, by which KV expires.

    Returns
    -------
    GarbageReport
        What was removed.

    Raises
    ------
    StoreFormatError
        If the folder is in a format that this version does not read.
    StoreReadOnlyError
        If it is not writable.
    StoreError
        If it is not a store.
    """
    report = GarbageReport()
    # Opening removes what killed processes left.
    with existing_store(location, clock=clock) as tier:
        # What is still to be found again by its files is nobody's leftover.
        tier.adopt()
        before = _index_bytes(tier)
        now = tier.clock()
        while count := _remove(tier, tier.deleting(lambda: tier.index.drop_expired(now, _AT_ONCE)), report):
            report.expired += count
        if unnamed_age_s is not None:
            added_before = tier.clock() - unnamed_age_s
            keys = (key for key, _ in tier.index.entries())
            while batch := list(islice(keys, _AT_ONCE)):
                drop = partial(tier.index.drop_nameless, batch, added_before)
                report.unnamed += _remove(tier, tier.deleting(drop), report)
        # What killed ingestions put without coming to name it.
        with tier.folder.turns.alone() as is_alone:
            names = Names(tier.index, tier.clock)
            if is_alone and (abandoned := names.abandoned()):
                report.unnamed += _remove(tier, names.give_up(abandoned), report)
        for path in tier.folder.files():
            if tier.folder.is_file_name(path.name) and tier.is_orphan(path):
                report.orphans += 1
                report.freed_bytes += path.stat().st_size
                tier.folder.unlink(path.name)
        tier.database.tidy()
    report.index_bytes = before - _index_bytes(tier)
    return report


def pin_chunks(location: str | Path, ids: Sequence[str], *, pinned: bool = True, tenant: str | None = None) -> int:
    """Pin chunks of every model that knows their ids, or unpin them. Other processes may go on using the store.

    No byte budget is checked here: a process that opens the store with one finds less room for what it adds.

    Parameters
    ----------
    location : str or Path
        The store's folder.
    ids : sequence of str
        The chunks' ids.
    pinned : bool
        Whether their KV is to be kept, or may be evicted again.
    tenant : str, optional
        Only what belongs to this tenant; "" is for what has no tenant.

    Returns
    -------
    int
        Bytes of KV on disk that are pinned now, in the whole store.

    Raises
    ------
    UnknownChunkError
        If nobody knows an id; nothing is changed then.
    StoreReadOnlyError
        If the folder is not writable.
    StoreError
        If the folder is not a store.
    """
    with existing_store(location) as tier:
        names = Names(tier.index, tier.clock)
        spaces = names.spaces_of(ids, tenant)
        check_known(ids, {node for known in spaces.values() for node in known})
        for namespace, known in spaces.items():
            names.pin(namespace, known, pinned)
        return tier.index.pinned_bytes()


def _remove(tier: DiskTier, dropped: Dropped, report: GarbageReport) -> int:
    for name in dropped.files:
        path = tier.folder.file_path(name)
        report.freed_bytes += path.stat().st_size if path.exists() else 0
    tier.remove(dropped)
    return len(dropped.keys)


def _index_bytes(tier: DiskTier) -> int:
    index = tier.folder.index_path
    files = [index, index.with_name(index.name + "-wal")]
    return sum(path.stat().st_size for path in files if path.exists())
