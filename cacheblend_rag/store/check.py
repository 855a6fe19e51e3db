"""Verifying a store folder: index against files against checksums."""

from __future__ import annotations

from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path

from cacheblend_rag.errors import ChunkReadError, StoreError
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.collect import existing_store, is_orphan
from cacheblend_rag.store.damage import Damage
from cacheblend_rag.store.database import Database
from cacheblend_rag.store.disk import DiskTier
from cacheblend_rag.store.entries import Entry
from cacheblend_rag.store.folder import StoreFolder
from cacheblend_rag.store.index import Index
from cacheblend_rag.store.names import Names
from cacheblend_rag.store.tally import Tally

__all__ = ["CheckReport", "check_store"]

_log = getLogger(__name__)


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
        What is wrong, one sentence each. A damaged or missing file is no danger to answers: it counts as a miss when it is met.
    repaired : bool
        Whether the problems have been mended.
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

    Other processes may go on using the store, except when a damaged index is repaired.

    Parameters
    ----------
    location : str or Path
        The folder.
    repair : bool
        Drop what is damaged or belongs to nothing. KV that is dropped is computed again when it is next asked for. If the
        index itself is damaged it is made anew from the files; the names in it are lost until their chunks are added again, which
        finds their KV still there.

    Returns
    -------
    CheckReport
        What was found.

    Raises
    ------
    StoreFormatError
        If the folder is in a format that this version does not read.
    StoreReadOnlyError
        If it is to be repaired and may not be written.
    StoreError
        If the folder is no store.
    """
    folder = existing_store(location)
    report = CheckReport()
    try:
        database = Database(folder.index_path, read_only=True)
        try:
            findings = _examine(folder, database, report)
        finally:
            database.close()
    except StoreError as error:
        report.problems.append(str(error))
        if repair:
            _rebuild(folder)
    else:
        if repair and report.problems:
            _mend(folder.path, findings)
    report.repaired = repair and bool(report.problems)
    return report


@dataclass(slots=True)
class _Findings:
    """What a repair has to remove."""

    keys: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    names: list[tuple[str, str]] = field(default_factory=list)
    documents: list[tuple[str, str]] = field(default_factory=list)


def _examine(folder: StoreFolder, database: Database, report: CheckReport) -> _Findings:
    index, damage = Index(database), Damage(database)
    findings = _Findings()
    report.problems += Tally(database).damage()
    for path in folder.writers.leftovers():
        report.problems.append(f"{path.name} was left by a killed process; the next opening of the store removes it")
    for key, entry in index.entries():
        flaw = _flaw(folder, key, entry)
        if flaw is None:
            report.entries += 1
            report.bytes += entry.nbytes
        elif index.has_file(entry.file, key):
            # Otherwise another process has dropped it meanwhile.
            report.problems.append(flaw)
            findings.keys.append(key)
    for path in folder.files():
        if not folder.is_file_name(path.name):
            report.problems.append(f"{path} is not the store's; move it away")
        elif is_orphan(folder, index, path):
            report.problems.append(f"file {path.name} belongs to no entry")
            findings.files.append(path.name)
    for namespace, node in damage.names():
        report.problems.append(f"the record of name {node!r} does not match its checksum")
        findings.names.append((namespace, node))
    for namespace, document in damage.documents():
        report.problems.append(
            f"the record of document {document!r} does not match the keys of its chunks, or its checksum"
        )
        findings.documents.append((namespace, document))
    if strays := damage.strays():
        report.problems.append(f"{strays} rows say where in a document something stands that is not there")
    report.names = Names(database).count()
    return findings


def _flaw(folder: StoreFolder, key: str, entry: Entry) -> str | None:
    try:
        file = ChunkFile.open(folder.file_path(entry.file), key)
        if file.digest != entry.digest:
            return f"file {entry.file} is not the one that was written"
        file.verify()
    except FileNotFoundError:
        return f"file {entry.file} is missing"
    except StoreError as error:
        return str(error)
    return None


def _mend(path: Path, findings: _Findings) -> None:
    # Opening the store removes what killed processes left.
    tier = DiskTier(path, None)
    try:
        for key in findings.keys:
            tier.discard(key)
        for name in findings.files:
            tier.folder.unlink(name)
        names = Names(tier.database)
        writer = tier.folder.writers.own()
        for namespace, node in findings.names:
            _, dropped = names.remove(namespace, [node], writer)
            tier.remove(dropped)
        damage = Damage(tier.database)
        for namespace, document in findings.documents:
            tier.remove(damage.reread(namespace, document, writer))
        damage.remove_strays()
        Tally(tier.database).recount()
    finally:
        tier.close()


def _rebuild(folder: StoreFolder) -> None:
    """Make the index anew from the files."""
    with folder.opening():
        folder.renew_index()
        database = Database(folder.index_path)
        try:
            for path in folder.files():
                if folder.is_file_name(path.name):
                    _adopt(folder, Index(database), path)
        finally:
            database.close()
            folder.writers.close()


def _adopt(folder: StoreFolder, index: Index, path: Path) -> None:
    key = path.name.partition(".")[0]
    try:
        file = ChunkFile.open(path, key)
        file.verify()
    except ChunkReadError as error:
        _log.warning("file removed: %s", error)
        folder.unlink(path.name)
        return
    for name in index.add_many([(key, Entry(path.name, file.file_bytes, file.digest))]):
        folder.unlink(name)
