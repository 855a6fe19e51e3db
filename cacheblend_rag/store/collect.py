"""Removing from a store folder what nobody can use any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cacheblend_rag.errors import StoreError, StoreReadOnlyError
from cacheblend_rag.store.clock import StoreClock
from cacheblend_rag.store.disk import DiskTier
from cacheblend_rag.store.entries import Dropped
from cacheblend_rag.store.folder import StoreFolder
from cacheblend_rag.store.index import Index

__all__ = ["GarbageReport", "collect_garbage", "existing_store", "is_orphan"]

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
        Entries that no name led to.
    orphans : int
        Files that belonged to no entry.
    freed_bytes : int
        Size of the files removed.
    index_bytes : int
        What the index and its log take less than before; less than 0 if they take more.
    """

    expired: int = 0
    unnamed: int = 0
    orphans: int = 0
    freed_bytes: int = 0
    index_bytes: int = 0


def collect_garbage(
    location: str | Path, unnamed_age_s: float | None = None, clock: StoreClock | None = None
) -> GarbageReport:
    """Remove expired KV, files that belong to nothing, and what killed processes left, and give unused room back to the disk.

    Other processes may go on using the store.

    Parameters
    ----------
    location : str or Path
        The folder.
    unnamed_age_s : float, optional
        Remove KV, too, that was added at least so long ago and that no name leads to. By default it is kept until room is needed.
    clock : StoreClock, optional
        What tells what has expired.

    Returns
    -------
    GarbageReport
        What was removed.

    Raises
    ------
    StoreFormatError
        If the folder is in a format that this version does not read.
    StoreReadOnlyError
        If it may not be written.
    StoreError
        If it is no store.
    """
    folder = existing_store(location)
    if folder.read_only:
        raise StoreReadOnlyError(f"store folder {folder.path} may not be written; it can only be read")
    report = GarbageReport()
    before = _index_bytes(folder)
    # Opening removes what killed processes left.
    tier = DiskTier(folder.path, None, clock=clock)
    try:
        while count := _remove(tier, tier.index.drop_expired(tier.clock.now(), _AT_ONCE, _writer(tier)), report):
            report.expired += count
        if unnamed_age_s is not None:
            added_before = tier.clock.now() - unnamed_age_s
            for keys in _batches(key for key, _ in tier.index.entries()):
                dropped = tier.index.drop_nameless(keys, added_before, _writer(tier))
                report.unnamed += _remove(tier, dropped, report)
        for path in tier.folder.files():
            if tier.folder.is_file_name(path.name) and is_orphan(tier.folder, tier.index, path):
                report.orphans += 1
                report.freed_bytes += path.stat().st_size
                tier.folder.unlink(path.name)
        tier.database.tidy()
    finally:
        tier.close()
    report.index_bytes = before - _index_bytes(folder)
    return report


def existing_store(location: str | Path) -> StoreFolder:
    """Return the folder of a store that is there.

    Raises
    ------
    StoreError
        If it is none.
    """
    path = Path(location).expanduser()
    if not path.exists():
        raise StoreError(f"there is no folder {path}; name the folder of a store")
    folder = StoreFolder(path)
    if not folder.is_made:
        raise StoreError(f"folder {path} is empty; name the folder of a store")
    return folder


def is_orphan(folder: StoreFolder, index: Index, path: Path) -> bool:
    """Return whether a file belongs to no entry, and no living process is about to give it one."""
    # A file is pending until it has an entry and again when it has lost it. Looking for the entry between two looks at what is
    # pending therefore finds whatever a living process is about to do with it.
    for _ in range(2):
        writer = index.pending_writer(path.name)
        if writer is not None and folder.writers.is_alive(writer):
            return False
        if index.has_file(path.name, path.name.partition(".")[0]):
            return False
    return path.exists()


def _writer(tier: DiskTier) -> str:
    return tier.folder.writers.own()


def _remove(tier: DiskTier, dropped: Dropped, report: GarbageReport) -> int:
    for name in dropped.files:
        path = tier.folder.file_path(name)
        report.freed_bytes += path.stat().st_size if path.exists() else 0
    tier.remove(dropped)
    return len(dropped.keys)


def _batches(keys: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(islice(keys, _AT_ONCE)):
        yield batch


def _index_bytes(folder: StoreFolder) -> int:
    files = [folder.index_path, folder.index_path.with_name(folder.index_path.name + "-wal")]
    return sum(path.stat().st_size for path in files if path.exists())
