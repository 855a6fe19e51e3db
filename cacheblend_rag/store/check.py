"""Verifying a store folder: index, files and checksums against each other, and names and documents against each other."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TypeAlias

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store.disk import DiskTier, existing_store
from cacheblend_rag.store.documents import Drafts, is_sound
from cacheblend_rag.store.folder import existing_folder
from cacheblend_rag.store.index import counter
from cacheblend_rag.store.names import Names, drop_nameless
from cacheblend_rag.store.restore import compare, heal_index

__all__ = ["CheckReport", "check_store"]

_LOCK_TIMEOUT_S = 60.0
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
        What is wrong, one sentence each, and what of the index was restored. A damaged or missing file is no danger to answers:
        it counts as a miss when it is met.
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
        Drop what is damaged or belongs to nothing. KV that is dropped is computed again when it is next asked for. If the
        index itself is damaged, it is restored from its mirror. Where that is damaged too, KV is found again by its files, and
        names that are lost come back when their chunks are added again.

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
    folder = existing_folder(location)
    report = CheckReport()
    repairs: list[Repair] | None = None
    try:
        with existing_store(location, read_only=True) as tier:
            repairs = _examine(tier, report)
    except StoreError as error:
        report.problems.append(str(error))
    wrong = compare(folder.index_path, _LOCK_TIMEOUT_S)
    if wrong is not None:
        report.problems.append(wrong)
    if repair and report.problems:
        report.repaired = True
        with folder.opening():
            is_refused = repairs is None or wrong is not None
            done = heal_index(folder.index_path, None, _LOCK_TIMEOUT_S, is_refused) if is_refused else None
        # Opening the store removes what killed processes left.
        with existing_store(location) as tier:
            if done is not None:
                report.problems.append(f"index {folder.index_path}: {done}")
            if done is not None or tier.index.is_adopting():
                tier.adopt()
                again = CheckReport()
                repairs = _examine(tier, again)
                report.problems += [problem for problem in again.problems if problem not in report.problems]
            _mend(tier, repairs or [])
    return report


Repair: TypeAlias = Callable[[DiskTier], None]
"""Removes something that is wrong, or reads it anew."""


def _examine(tier: DiskTier, report: CheckReport) -> list[Repair]:
    index, folder, problems = tier.index, tier.folder, report.problems
    repairs: list[Repair] = []
    with tier.database.snapshot() as connection:
        problems += _miscounts(connection)
    for path in folder.leftovers():
        problems.append(f"{path.name} was left by a killed process; it is removed when the store is next opened")
    for key, entry in index.entries():
        flaw = tier.flaw(key, entry, every_byte=True)
        if flaw is None:
            report.entries += 1
            report.bytes += entry.nbytes
        elif index.has_file(entry.file, key):
            # Otherwise another process has dropped it meanwhile.
            problems.append(flaw)
            repairs.append(methodcaller("discard", key))
    for path in folder.files():
        if not folder.is_file_name(path.name):
            problems.append(f"{path} does not belong to the store; move it elsewhere")
        elif tier.is_orphan(path):
            problems.append(f"file {path.name} belongs to no entry")
            repairs.append(partial(_unlink, path.name))
    with tier.database.snapshot() as connection:
        names, documents = _damaged_records(connection)
        strays = sum(int(connection.execute(f"SELECT count(*) FROM {rows}").fetchone()[0]) for rows in _STRAY)
    for namespace, node in names:
        problems.append(f"the record of name {node!r} does not match its checksum")
        repairs.append(partial(_forget, namespace, node))
    for namespace, document in documents:
        problems.append(f"the record of document {document!r} does not match the keys of its chunks, or its checksum")
        repairs.append(partial(_read_anew, namespace, document))
    if strays:
        problems.append(f"{strays} rows describe pieces of documents, or documents, that do not exist")
    report.names = index.share()[2]
    return repairs


def _miscounts(connection: sqlite3.Connection) -> list[str]:
    """Return what is wrong with the sums that triggers keep, so that nobody has to go through a million rows."""
    found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(20)") if row[0] != "ok"]
    if found:
        raise sqlite3.DatabaseError(f"database disk image is malformed: {found[0]}")
    counted = counter(connection, "entry_bytes"), counter(connection, "pinned_bytes")
    total = connection.execute(f"SELECT {_BYTES}, {_PINNED_BYTES} FROM entries").fetchone()
    if counted != total:
        return [f"the index counts {counted[0]} bytes, {counted[1]} pinned, but its entries have {total}"]
    shares = set(connection.execute("SELECT tenant, entries, bytes, names FROM tenants WHERE entries OR names"))
    counts = set(connection.execute(_SHARES))
    if shares != counts:
        return [f"the index counts {sorted(shares)} as the tenants' shares, but they have {sorted(counts)}"]
    return []


def _recount(connection: sqlite3.Connection) -> None:
    for name, total in (("entry_bytes", _BYTES), ("pinned_bytes", _PINNED_BYTES)):
        query = f"UPDATE counters SET value = (SELECT {total} FROM entries) WHERE name = ?"
        connection.execute(query, (name,))
    shares = connection.execute(_SHARES).fetchall()
    connection.execute("DELETE FROM tenants")
    connection.executemany("INSERT INTO tenants VALUES (?, ?, ?, ?)", shares)
    connection.execute("INSERT OR IGNORE INTO tenants VALUES ('', 0, 0, 0)")


def _damaged_records(connection: sqlite3.Connection) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return names and documents, each with its namespace, that are not what was written or do not go together.

    A name's record or its place in its document is damaged; or a document's, or that is not what made the keys of its chunks.
    """
    names = [tuple(row[:2]) for row in connection.execute(_NAMES) if not is_sound(*row)]
    names += connection.execute(_HOMELESS).fetchall()
    documents = []
    for namespace, document in connection.execute("SELECT namespace, name FROM documents").fetchall():
        drafts = Drafts(connection, namespace)
        drafts.load(document)
        names += [(namespace, id) for id in drafts.damaged_names]
        if drafts.damaged_documents or any(target.is_changed for target in drafts.targets().values()):
            documents.append((namespace, document))
    return list(dict.fromkeys(names)), documents


def _mend(tier: DiskTier, repairs: list[Repair]) -> None:
    for repair in repairs:
        repair(tier)
    with tier.database.write() as connection:
        for rows in _STRAY:
            connection.execute(f"DELETE FROM {rows}")
        _recount(connection)


def _unlink(file: str, tier: DiskTier) -> None:
    tier.folder.unlink(file)


def _forget(namespace: str, node: str, tier: DiskTier) -> None:
    *_, dropped = Names(tier.index, tier.clock).remove(namespace, [node])
    tier.remove(dropped)


def _read_anew(namespace: str, document: str, tier: DiskTier) -> None:
    with tier.database.write() as connection:
        drafts = Drafts(connection, namespace)
        drafts.load(document)
        dropped = drop_nameless(connection, drafts.save(drafts.targets()))
    tier.remove(dropped)
