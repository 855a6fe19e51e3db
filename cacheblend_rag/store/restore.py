"""Restoring an index that is damaged, lost or behind, from its mirror, or from what is left of both."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cacheblend_rag.store.documents import is_sound, is_sound_document, is_sound_place
from cacheblend_rag.store.folder import sync_folder
from cacheblend_rag.store.mirror import alone_in, last_revision, mirror_of
from cacheblend_rag.store.schema import MIRRORED, columns, make_tables, restart_sequences

__all__ = ["BROKEN", "Doubt", "compare", "connect_source", "find_rows", "heal_index", "is_sound_row"]

BROKEN = (sqlite3.Error, UnicodeDecodeError)
"""What a damaged database raises: SQLite quotes a damaged schema in its message, which then is not text."""

_ROWS_AT_ONCE = 1000
_KEY = re.compile(r"[0-9a-f]{8,128}")


@dataclass(frozen=True, slots=True)
class Doubt:
    """Rows of a table of which the index is not believed: those for which `where` holds with these values."""

    table: str
    where: str
    values: tuple[Any, ...]


def connect_source(path: Path, is_mirror: bool, busy_s: float) -> sqlite3.Connection:
    """Open the index or its mirror, which are then read by the same queries."""
    uri = f"file:{quote(str(path.absolute()))}?mode=rw"
    connection = sqlite3.connect(uri, uri=True, timeout=busy_s, isolation_level=None, check_same_thread=False)
    # A damaged text is then another text.
    connection.text_factory = partial(str, encoding="utf-8", errors="replace")
    if is_mirror:
        try:
            for table in MIRRORED:
                connection.execute(f"CREATE TEMP VIEW {table} AS SELECT * FROM main.mirrored_{table}")
        except BROKEN:
            connection.close()
            raise
    return connection


def find_rows(connection: sqlite3.Connection, doubt: Doubt) -> list[tuple[Any, ...]]:
    """Return the rows that are in doubt."""
    query = f"SELECT {', '.join(columns(doubt.table))} FROM {doubt.table} WHERE {doubt.where}"
    return sorted(connection.execute(query, doubt.values), key=repr)


class Source:
    """The index or its mirror, whatever state it is in; `revision` is None where it does not say.

    It is read as it is now, and while it is open nobody commits to a mirror; with `alone` nobody begins to write to it.
    """

    def __init__(self, path: Path, is_mirror: bool, busy_s: float, alone: bool = False) -> None:
        self.revision: int | None = None
        self._connection: sqlite3.Connection | None = None
        with suppress(OSError):
            if not path.stat().st_size:
                return
        try:
            self._connection = connect_source(path, is_mirror, busy_s)
            self._connection.execute("BEGIN IMMEDIATE" if alone else "BEGIN")
            query = "SELECT value FROM " + ("mirrored_revision" if is_mirror else "counters WHERE name = 'revision'")
            row = self._connection.execute(query).fetchone()
            self.revision = row[0] if row is not None and isinstance(row[0], int) else None
        except BROKEN as error:
            if "locked" in str(error):
                self.close()
                raise

    @property
    def is_open(self) -> bool:
        """Whether there is anything to read."""
        return self._connection is not None

    def close(self) -> None:
        """Let go of the file."""
        if self._connection is not None:
            self._connection.close()

    def is_whole(self) -> bool:
        """Return whether SQLite finds nothing wrong with it."""
        if self._connection is None or self.revision is None:
            return False
        try:
            (found,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
            for table in MIRRORED:
                self._connection.execute(f"SELECT {', '.join(columns(table))} FROM {table} LIMIT 1")
            return bool(found == "ok")
        except BROKEN:
            return False

    def find(self, doubt: Doubt) -> list[tuple[Any, ...]] | None:
        """Return the rows that are in doubt, None where they cannot be read."""
        try:
            return None if self._connection is None else find_rows(self._connection, doubt)
        except BROKEN:
            return None

    def agrees(self, other: Source) -> bool:
        """Return whether another one says the same."""
        return all(
            row is not None and row == same
            for table in MIRRORED
            for row, same in zip_longest(self.rows(table), other.rows(table))
        )

    def rows(self, table: str) -> Iterator[tuple[Any, ...] | None]:
        """Yield the rows of a table, from either end as far as they can be read; None where that is not all of them."""
        if self._connection is None:
            yield None
            return
        query = f"SELECT {', '.join(columns(table))} FROM {table} ORDER BY "
        keys = MIRRORED[table][0].split(", ")
        try:
            yield from self._connection.execute(query + ", ".join(keys))
        except BROKEN:
            yield None
            with suppress(*BROKEN):
                yield from self._connection.execute(query + ", ".join(f"{key} DESC" for key in keys))


def compare(index: Path, busy_s: float) -> str | None:
    """Return what is wrong between an index and its mirror, None if nothing is, or if there is none."""
    mirror = Source(mirror_of(index), True, busy_s)
    old = Source(index, False, busy_s)
    try:
        if old.revision is None or not mirror.is_open:
            return None
        if not mirror.is_whole() or mirror.revision is None:
            return f"mirror {mirror_of(index)} is damaged; it is made anew when the store is next opened"
        if old.revision < mirror.revision:
            return f"index {index} is behind its mirror; it is restored when the store is next opened"
        if old.revision == mirror.revision and not old.agrees(mirror):
            return f"index {index} does not say what its mirror says"
        return None
    finally:
        old.close()
        mirror.close()


def heal_index(index: Path, doubt: Doubt | None, busy_s: float, is_refused: bool = False) -> str | None:
    """Restore an index from its mirror, or remove the mirror; return what was done if names or KV depend on it.

    Parameters
    ----------
    index : Path
        Where it is, or was.
    doubt : Doubt, optional
        What it says otherwise than its mirror does.
    busy_s : float
        How long to wait for other processes.
    is_refused : bool
        Whether it is not believed though SQLite finds nothing wrong with it.
    """
    with alone_in(index.parent), ExitStack() as stack:
        # Who writes the index has to write the mirror.
        mirror = Source(mirror_of(index), True, busy_s, alone=True)
        stack.callback(mirror.close)
        old = Source(index, False, busy_s)
        stack.callback(old.close)
        if doubt is not None and old.revision == mirror.revision:
            is_refused = old.find(doubt) != mirror.find(doubt)
        if old.revision is not None and not is_refused and old.is_whole():
            is_mirrored = mirror.is_whole()
            if not is_mirrored or mirror.revision is None or old.revision >= mirror.revision:
                if not is_mirrored or old.revision != mirror.revision:
                    stack.close()
                    # It is of no use, but takes room.
                    mirror_of(index).unlink(missing_ok=True)
                return None
        last = last_revision(index)
        sources = _believed(mirror, old, last)
        known = [last, *(source.revision for source in (mirror, old) if source.revision is not None)]
        new = index.with_name(index.name + ".new")
        names, entries, is_complete = _build(new, sources, max(known) + 1)
        # In this order: an index that has lost its log is behind its mirror, and restored again.
        for ending in ("-wal", "-shm"):
            index.with_name(index.name + ending).unlink(missing_ok=True)
        new.rename(index)
        sync_folder(index.parent)
        # Where there is none, whoever writes next makes one.
        mirror_of(index).unlink(missing_ok=True)
    if not names and not entries and not any((index.parent / "kv").glob("*/*")):
        return "nothing is left of the store; it is begun anew, and KV is computed again when chunks are added or asked for"
    found = f"{names} names and {entries} entries of KV were restored"
    if is_complete:
        return f"{found} from its mirror"
    return (
        f"its mirror does not say everything either; {found}, other KV is sought in the files, and names come back when their "
        "chunks are added again; what has none by then takes room until `cacheblend-rag store gc --unnamed-days 0`"
    )


def _believed(mirror: Source, old: Source, last: int) -> list[Source]:
    """Return what to restore from, the best first; never what is behind, or names that were deleted would come back."""
    if mirror.revision is not None and max(mirror.revision, old.revision or 0) < last:
        return [old] if old.revision is None else []
    if mirror.revision is None or old.revision is None or mirror.revision == old.revision:
        return [mirror, old]
    return [mirror] if mirror.revision > old.revision else [old]


def _build(path: Path, sources: list[Source], revision: int) -> tuple[int, int, bool]:
    """Write an index; return how many names and entries it has, and whether that is all there were."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN")
        make_tables(connection)
        is_complete = False
        for source in sources:
            is_complete = all([_copy(source, table, connection) for table in MIRRORED])
            if is_complete:
                break
        if not is_complete:
            _drop_strays(connection)
            # Where machines share names, all of them are read again.
            connection.execute("UPDATE shared SET birth = '', position = 0")
        restart_sequences(connection)
        connection.execute("UPDATE counters SET value = ? WHERE name = 'revision'", (revision,))
        connection.execute("UPDATE counters SET value = ? WHERE name = 'adopting'", (not is_complete,))
        connection.execute("COMMIT")
        names, entries = (
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("nodes", "entries")
        )
    finally:
        # Everything is synced and in the file itself then.
        connection.close()
    return int(names), int(entries), is_complete


def _copy(source: Source, table: str, connection: sqlite3.Connection) -> bool:
    """Copy what is sound of a table and not there yet; return whether that was everything."""
    names = columns(table)
    statement = f"INSERT OR IGNORE INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    is_complete = True
    rows = source.rows(table)
    while batch := list(islice(rows, _ROWS_AT_ONCE)):
        sound = [row for row in batch if row is not None and is_sound_row(table, row, connection)]
        is_complete = is_complete and len(sound) == len(batch)
        if "tenant" in names:
            at = names.index("tenant")
            connection.executemany("INSERT OR IGNORE INTO tenants VALUES (?, 0, 0, 0)", ((row[at],) for row in sound))
        connection.executemany(statement, sound)
    return is_complete


def is_sound_row(table: str, row: tuple[Any, ...], connection: sqlite3.Connection) -> bool:
    """Return whether a row is what was written, as far as can be seen; the names of pieces have been copied."""
    values = dict(zip(columns(table), row, strict=True))
    if table == "nodes":
        named = ("namespace", "id", "key", "text_hash", "token_ids", "separator", "checksum")
        return type(values["seq"]) is int and is_sound(*(values[name] for name in named))
    if table == "documents":
        return type(values["number"]) is int and is_sound_document(*row[1:])
    if table == "members":
        name = (
            connection.execute("SELECT id FROM nodes WHERE seq = ?", row[:1]).fetchone()
            if type(row[0]) is int
            else None
        )
        return name is not None and is_sound_place(name[0], *row[1:])
    if table == "entries":
        key, file, nbytes, digest, tenant, added_at, expires_at, pinned = row
        return (
            _is_file_of(file, key)
            and type(nbytes) is int
            and isinstance(digest, bytes)
            and isinstance(tenant, str)
            and isinstance(added_at, float | int)
            and isinstance(expires_at, float | int | None)
            and pinned in (0, 1)
        )
    if table == "removals":
        return isinstance(row[0], str) and _is_file_of(row[0], row[0].partition(".")[0])
    if table == "origins":
        return type(row[0]) is int and all(isinstance(value, str) for value in row[1:])
    if table == "shared":
        return row[0] == 1 and isinstance(row[1], str) and type(row[2]) is int
    return all(isinstance(value, str) for value in row)


def _is_file_of(file: Any, key: Any) -> bool:
    is_text = isinstance(file, str) and isinstance(key, str) and _KEY.fullmatch(key) is not None
    return is_text and re.fullmatch(re.escape(key) + r"\.[0-9a-f]{16}\.safetensors", file) is not None


def _drop_strays(connection: sqlite3.Connection) -> None:
    """Drop names that are pieces of a document of which nothing is known, and what is of no name."""
    connection.execute(
        "DELETE FROM nodes WHERE seq IN (SELECT seq FROM members WHERE document NOT IN (SELECT number FROM documents))"
    )
    connection.execute("DELETE FROM documents WHERE number NOT IN (SELECT document FROM members)")
