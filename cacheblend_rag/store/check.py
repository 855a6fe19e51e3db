"""Verifying a store folder: index against files against checksums, and names and documents against each other."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path

from cacheblend_rag.errors import ChunkReadError, StoreError
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.collect import is_orphan
from cacheblend_rag.store.database import Database
from cacheblend_rag.store.disk import DiskTier, flaw_of
from cacheblend_rag.store.documents import Drafts, is_sound, read_document, read_pieces
from cacheblend_rag.store.folder import StoreFolder, existing_store
from cacheblend_rag.store.index import Entry, Index, counter
from cacheblend_rag.store.names import Names, drop_nameless

__all__ = ["CheckReport", "check_store"]

_log = getLogger(__name__)

_BYTES = "ifnull(sum(bytes), 0)"
_PINNED_BYTES = "ifnull(sum(CASE WHEN pinned THEN bytes END), 0)"
_SHARES = """
SELECT tenant, sum(entries), sum(bytes), sum(names) FROM (
    SELECT tenant, count(*) AS entries, sum(bytes) AS bytes, 0 AS names FROM entries GROUP BY tenant
    UNION ALL
    SELECT ifnull(tenant, ''), 0, 0, count(*) FROM nodes LEFT JOIN namespaces USING (namespace) GROUP BY 1
) GROUP BY tenant
"""
_NAMES = "SELECT namespace, id, key, text_hash, token_ids, separator, checksum FROM nodes"
_HOMELESS = (
    "SELECT nodes.namespace, id FROM members JOIN nodes USING (seq) LEFT JOIN documents ON number = members.document "
    "AND documents.namespace = nodes.namespace WHERE number IS NULL"
)
# Of no name, and of no chunk.
_STRAY = (
    "members WHERE seq NOT IN (SELECT seq FROM nodes)",
    "documents WHERE number NOT IN (SELECT document FROM members)",
)


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
    """What a repair has to remove, or to read anew: names and documents each with their namespace."""

    keys: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    names: list[tuple[str, str]] = field(default_factory=list)
    documents: list[tuple[str, str]] = field(default_factory=list)


def _examine(folder: StoreFolder, database: Database, report: CheckReport) -> _Findings:
    index = Index(database)
    findings = _Findings()
    with database.snapshot() as connection:
        report.problems += _miscounts(connection)
    for path in folder.writers.leftovers():
        report.problems.append(f"{path.name} was left by a killed process; the next opening of the store removes it")
    for key, entry in index.entries():
        flaw = flaw_of(folder, key, entry)
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
    with database.snapshot() as connection:
        findings.names = _damaged_names(connection)
    with database.snapshot() as connection:
        findings.documents = _damaged_documents(connection)
    with database.snapshot() as connection:
        strays = sum(int(connection.execute(f"SELECT count(*) FROM {rows}").fetchone()[0]) for rows in _STRAY)
    report.problems += [f"the record of name {node!r} does not match its checksum" for _, node in findings.names]
    report.problems += [
        f"the record of document {document!r} does not match the keys of its chunks, or its checksum"
        for _, document in findings.documents
    ]
    if strays:
        report.problems.append(f"{strays} rows say where in a document something stands that is not there")
    report.names = index.share()[2]
    return findings


def _miscounts(connection: sqlite3.Connection) -> list[str]:
    """Return what is wrong with the sums that triggers keep, so that nobody has to go through a million rows."""
    found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(20)") if row[0] != "ok"]
    if found:
        raise sqlite3.DatabaseError(f"database disk image is malformed: {found[0]}")
    counted = counter(connection, "entry_bytes"), counter(connection, "pinned_bytes")
    total = connection.execute(f"SELECT {_BYTES}, {_PINNED_BYTES} FROM entries").fetchone()
    if counted != total:
        return [f"the index counts {counted[0]} bytes, {counted[1]} pinned, where its entries have {total}"]
    shares = set(connection.execute("SELECT tenant, entries, bytes, names FROM tenants WHERE entries OR names"))
    counts = set(connection.execute(_SHARES))
    if shares != counts:
        return [f"the index counts {sorted(shares)} as the tenants' shares where they have {sorted(counts)}"]
    return []


def _recount(connection: sqlite3.Connection) -> None:
    for name, total in (("entry_bytes", _BYTES), ("pinned_bytes", _PINNED_BYTES)):
        query = f"UPDATE counters SET value = (SELECT {total} FROM entries) WHERE name = ?"
        connection.execute(query, (name,))
    shares = connection.execute(_SHARES).fetchall()
    connection.execute("DELETE FROM tenants")
    connection.executemany("INSERT INTO tenants VALUES (?, ?, ?, ?)", shares)
    connection.execute("INSERT OR IGNORE INTO tenants VALUES ('', 0, 0, 0)")


def _documents(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    return connection.execute("SELECT namespace, name FROM documents").fetchall()


def _damaged_names(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Return the namespace and id of each name whose record, or whose place in its document, is not what was written."""
    found = [tuple(row[:2]) for row in connection.execute(_NAMES) if not is_sound(*row)]
    found += connection.execute(_HOMELESS).fetchall()
    for namespace, document in _documents(connection):
        known = read_document(connection, namespace, document)
        pieces = () if known is None else read_pieces(connection, namespace, document, known[0])
        found += [(namespace, id) for id, piece in pieces if piece is None]
    return list(dict.fromkeys(found))


def _damaged_documents(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Return the namespace and name of each document whose record is damaged, or is not what made the keys of its chunks."""
    found = []
    for namespace, document in _documents(connection):
        drafts = Drafts(connection, namespace)
        drafts.load(document)
        known = read_document(connection, namespace, document)
        is_damaged = known is not None and known[1] is None
        if is_damaged or any(target.is_changed for target in drafts.targets().values()):
            found.append((namespace, document))
    return found


def _mend(path: Path, findings: _Findings) -> None:
    # Opening the store removes what killed processes left.
    tier = DiskTier(path)
    try:
        for key in findings.keys:
            tier.discard(key)
        for name in findings.files:
            tier.folder.unlink(name)
        names, writer = Names(tier.database, writer=tier.writer), tier.writer()
        for namespace, node in findings.names:
            tier.remove(names.remove(namespace, [node])[1])
        for namespace, document in findings.documents:
            with tier.database.write() as connection:
                drafts = Drafts(connection, namespace)
                drafts.load(document)
                dropped = drop_nameless(connection, drafts.save(drafts.targets()), writer)
            tier.remove(dropped)
        with tier.database.write() as connection:
            for rows in _STRAY:
                connection.execute(f"DELETE FROM {rows}")
            _recount(connection)
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
