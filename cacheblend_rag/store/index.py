"""What the store's files hold."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from cacheblend_rag.store.database import Database

__all__ = ["Dropped", "Entry", "Index", "counter", "drop_entries"]

# Other processes that saw fewer deletions than are kept look through all they hold.
_DELETIONS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """The KV of one chunk on disk: its file's name, size and header digest."""

    file: str
    nbytes: int
    digest: bytes


@dataclass(slots=True)
class Dropped:
    """What a transaction dropped: keys without KV now, and files to be removed, then settled with `Index.settle`."""

    keys: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


class Index:
    """The entries in a database; each method is one transaction.

    Parameters
    ----------
    database : Database
        Where they are kept.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    # Entries

    def entry(self, key: str) -> Entry | None:
        """Return the entry of `key`, or None."""
        with self._database.read() as connection:
            row = connection.execute("SELECT file, bytes, digest FROM entries WHERE key = ?", (key,)).fetchone()
        return None if row is None else Entry(str(row[0]), *row[1:])

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether it has an entry."""
        with self._database.read() as connection:
            return [
                connection.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone() is not None for key in keys
            ]

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yield all keys and entries in the order of their keys."""
        after = ""
        query = "SELECT key, file, bytes, digest FROM entries WHERE key > ? ORDER BY key LIMIT 1000"
        while True:
            with self._database.read() as connection:
                rows = connection.execute(query, (after,)).fetchall()
            yield from ((key, Entry(*row)) for key, *row in rows)
            if not rows:
                return
            after = rows[-1][0]

    def entry_count(self) -> int:
        """Return how many entries there are."""
        with self._database.read() as connection:
            return int(connection.execute("SELECT count(*) FROM entries").fetchone()[0])

    def entry_bytes(self) -> int:
        """Return the size of all entries' files."""
        with self._database.read() as connection:
            return counter(connection, "entry_bytes")

    def expect(self, file: str, writer: str) -> None:
        """Note that `file` is about to lie in the folder without an entry."""
        with self._database.write(durable=False) as connection:
            connection.execute("INSERT OR REPLACE INTO pending VALUES (?, ?)", (file, writer))

    def add(self, key: str, entry: Entry, replaced: Entry | None, limit_bytes: int | None, writer: str) -> Dropped:
        """Give `key` its entry, and drop the least recently used ones for room.

        Parameters
        ----------
        key : str
            The key.
        entry : Entry
            The entry, whose file lies in the folder and was expected.
        replaced : Entry, optional
            The damaged entry that this one replaces. If another process has been quicker, its entry stays and this one's file is
            among the dropped.
        limit_bytes : int, optional
            Most bytes that all entries together may have.
        writer : str
            Who removes the dropped files.

        Returns
        -------
        Dropped
            What was dropped for room, and files without an entry.
        """
        dropped = Dropped()
        with self._database.write() as connection:
            row = connection.execute("SELECT file FROM entries WHERE key = ?", (key,)).fetchone()
            if row is not None and (replaced is None or row[0] != replaced.file):
                dropped.files.append(entry.file)
                return dropped
            if row is not None:
                drop_entries(connection, [key], writer, dropped)
                dropped.keys.clear()
            clock = _advance(connection, 1)
            connection.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?, ?)", (key, entry.file, entry.nbytes, entry.digest, clock)
            )
            connection.execute("DELETE FROM pending WHERE file = ?", (entry.file,))
            if limit_bytes is not None:
                over = counter(connection, "entry_bytes") - limit_bytes
                victims = []
                oldest = connection.execute("SELECT key, bytes FROM entries WHERE key != ? ORDER BY last_used", (key,))
                while over > 0 and (victim := oldest.fetchone()) is not None:
                    victims.append(victim[0])
                    over -= victim[1]
                oldest.close()
                drop_entries(connection, victims, writer, dropped)
            connection.execute(
                "DELETE FROM deletions WHERE seq <= (SELECT max(seq) FROM deletions) - ?", (_DELETIONS_KEPT,)
            )
        return dropped

    def drop(self, keys: Sequence[str], writer: str, file: str | None = None) -> Dropped:
        """Drop entries; with `file` only if that is still the entry's file."""
        dropped = Dropped()
        with self._database.write() as connection:
            if file is not None:
                query = "SELECT 1 FROM entries WHERE key = ? AND file = ?"
                keys = [key for key in keys if connection.execute(query, (key, file)).fetchone()]
            drop_entries(connection, keys, writer, dropped)
        return dropped

    def clear(self, writer: str) -> Dropped:
        """Drop all entries and all names."""
        dropped = Dropped()
        with self._database.write() as connection:
            keys = [row[0] for row in connection.execute("SELECT key FROM entries")]
            drop_entries(connection, keys, writer, dropped)
            connection.execute("DELETE FROM nodes")
            connection.execute(
                "DELETE FROM deletions WHERE seq <= (SELECT max(seq) FROM deletions) - ?", (_DELETIONS_KEPT,)
            )
        return dropped

    def touch(self, keys: Sequence[str], wait: bool) -> None:
        """Mark entries as used in this order, the last one latest; without `wait` an error if another process is writing."""
        with self._database.write(durable=False, wait=wait) as connection:
            clock = _advance(connection, len(keys)) - len(keys)
            connection.executemany(
                "UPDATE entries SET last_used = ? WHERE key = ?", ((clock + 1 + n, key) for n, key in enumerate(keys))
            )

    # Files between two steps

    def pending(self) -> list[tuple[str, str]]:
        """Return the files that may lie in the folder without an entry, and who is to remove them."""
        with self._database.read() as connection:
            return connection.execute("SELECT file, writer FROM pending").fetchall()

    def pending_writer(self, file: str) -> str | None:
        """Return who is to give `file` an entry, or to remove it, or None if nobody is."""
        with self._database.read() as connection:
            row = connection.execute("SELECT writer FROM pending WHERE file = ?", (file,)).fetchone()
        return None if row is None else str(row[0])

    def has_file(self, file: str, key: str) -> bool:
        """Return whether `file` is the one of the entry of `key`."""
        entry = self.entry(key)
        return entry is not None and entry.file == file

    def settle(self, files: Iterable[str]) -> None:
        """Note that these files are gone."""
        with self._database.write(durable=False) as connection:
            connection.executemany("DELETE FROM pending WHERE file = ?", ((file,) for file in files))

    # Deletions

    def deletions(self) -> int:
        """Return a number that grows whenever an entry is dropped, by whatever process."""
        with self._database.read() as connection:
            return _last_deletion(connection)

    def deleted_since(self, seen: int) -> list[str] | None:
        """Return the keys dropped after `deletions` was `seen`, or None if that is too long ago to know."""
        with self._database.read() as connection:
            first = connection.execute("SELECT min(seq) FROM deletions").fetchone()[0]
            if first is not None and first > seen + 1:
                return None
            return [row[0] for row in connection.execute("SELECT key FROM deletions WHERE seq > ?", (seen,))]

    # Soundness

    def damage(self) -> list[str]:
        """Return what is wrong with the database, apart from single names.

        Raises
        ------
        StoreError
            If it is too damaged to work with.
        """
        with self._database.read() as connection:
            connection.execute("BEGIN")
            try:
                found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(20)") if row[0] != "ok"]
                if found:
                    raise sqlite3.DatabaseError(f"database disk image is malformed: {found[0]}")
                counted = counter(connection, "entry_bytes")
                total = connection.execute("SELECT ifnull(sum(bytes), 0) FROM entries").fetchone()[0]
            finally:
                connection.execute("ROLLBACK")
        return [] if counted == total else [f"the index counts {counted} bytes where its entries have {total}"]

    def recount(self) -> None:
        """Count the bytes of all entries anew."""
        with self._database.write() as connection:
            query = "UPDATE counters SET value = (SELECT ifnull(sum(bytes), 0) FROM entries) WHERE name = 'entry_bytes'"
            connection.execute(query)


def drop_entries(connection: sqlite3.Connection, keys: Iterable[str], writer: str, dropped: Dropped) -> None:
    """Drop entries in a transaction that has begun, and add them to `dropped`; `writer` is to remove their files."""
    for key in keys:
        row = connection.execute("SELECT file FROM entries WHERE key = ?", (key,)).fetchone()
        if row is not None:
            connection.execute("INSERT OR REPLACE INTO pending VALUES (?, ?)", (row[0], writer))
            connection.execute("DELETE FROM entries WHERE key = ?", (key,))
            dropped.keys.append(key)
            dropped.files.append(row[0])


def counter(connection: sqlite3.Connection, name: str) -> int:
    """Return the value of a counter."""
    return int(connection.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()[0])


def _advance(connection: sqlite3.Connection, steps: int) -> int:
    connection.execute("UPDATE counters SET value = value + ? WHERE name = 'clock'", (steps,))
    return counter(connection, "clock")


def _last_deletion(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT ifnull(max(seq), 0) FROM deletions").fetchone()[0])
