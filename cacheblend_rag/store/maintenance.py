"""Maintenance of a store folder: a check of every byte, removing what nobody can use any more, and pinning what is to stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cacheblend_rag.store.database import DamagedIndexError
from cacheblend_rag.store.disk import DiskTier, existing_store
from cacheblend_rag.store.names import Names, check_known

__all__ = ["CheckReport", "GarbageReport", "check_store", "collect_garbage", "pin_chunks"]

# Entries dropped in one transaction: others wait no longer than that takes.
_AT_ONCE = 500


@dataclass(slots=True)
class CheckReport:
    """What a check of a store found.

    Attributes
    ----------
    entries : int
        Chunks whose KV is sound.
    bytes : int
        Size of their files.
    names : int
        Names recorded.
    problems : list of str
        What is wrong, one sentence each. It is no danger to answers: damaged or missing KV counts as a miss when it is met.
    repaired : bool
        Whether the problems have been repaired.
    """

    entries: int = 0
    bytes: int = 0
    names: int = 0
    problems: list[str] = field(default_factory=list)
    repaired: bool = False

    @property
    def is_clean(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


def check_store(location: str | Path, repair: bool = False) -> CheckReport:
    """Read everything in a store folder and verify it.

    Other processes may go on using the store.

    Parameters
    ----------
    location : str or Path
        The folder.
    repair : bool
        Drop what is damaged. KV that is dropped is computed again when it is next asked for. A damaged index is set aside and
        begun anew: names come back, and find their KV, when their chunks are added again.

    Returns
    -------
    CheckReport
        What was found.

    Raises
    ------
    StoreFormatError
        If the folder is in a format that this version does not read.
    StoreReadOnlyError
        If it is to be repaired and is not writable.
    StoreError
        If the folder is not a store.
    """
    report = CheckReport()
    try:
        _examine(location, report)
    except DamagedIndexError as error:
        report.problems.append(str(error))
    if repair and report.problems:
        # Opening it sets aside an index that cannot be opened.
        with existing_store(location) as tier:
            with suppress(DamagedIndexError):
                tier.database.check()
            for key, _ in tier.index.entries():
                if tier.flaw(key, every_byte=True) is not None:
                    tier.discard(key)
        report.repaired = True
    return report


def _examine(location: str | Path, report: CheckReport) -> None:
    with existing_store(location, read_only=True) as tier:
        tier.database.check()
        for key, entry in tier.index.entries():
            flaw = tier.flaw(key, every_byte=True)
            if flaw is None:
                report.entries += 1
                report.bytes += entry.nbytes
            # Otherwise another process has dropped it meanwhile.
            elif tier.index.entry(key) is not None:
                report.problems.append(flaw)
        for path in tier.folder.strangers():
            report.problems.append(f"{path} does not belong to the store; move it elsewhere")
        report.names = tier.index.share()[2]


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
        Also remove KV that was added at least this long ago and has no name, sooner than it goes by itself.
    clock : callable, optional
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
    with existing_store(location, clock=clock) as tier:
        before = _index_bytes(tier)
        now, freed = tier.clock(), tier.index.share()[1]
        while keys := tier.index.expired(now, _AT_ONCE):
            report.expired += len(tier.with_room(lambda keys=keys: tier.index.drop(keys)).keys)  # type: ignore[misc]
        while unnamed_age_s is not None and (keys := tier.index.unnamed(now - unnamed_age_s, _AT_ONCE)):
            report.unnamed += len(tier.with_room(lambda keys=keys: tier.index.drop(keys)).keys)  # type: ignore[misc]
        report.freed_bytes = freed - tier.index.share()[1]
        for key, status in tier.folder.files():
            # A file has its entry before others see it, or has none because its writer was killed.
            if tier.index.entry(key) is None and tier.remove_orphan(key):
                report.orphans += 1
                report.freed_bytes += status.st_size
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


def _index_bytes(tier: DiskTier) -> int:
    index = tier.folder.index_path
    files = [index, index.with_name(index.name + "-wal")]
    return sum(path.stat().st_size for path in files if path.exists())
