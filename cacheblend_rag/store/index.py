"""What the store's files hold."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence

from cacheblend_rag.store.database import Database
from cacheblend_rag.store.entries import (
    COLUMNS,
    Dropped,
    Entry,
    advance_clock,
    counter,
    drop_entries,
    forget_old_deletions,
    insert_entry,
    last_deletion,
    make_room,
    read_entry,
)

__all__ = ["Index"]

# Expired entries dropped on the way by one addition; `gc` drops the others.
_EXPIRED_A_TIME = 64


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
        """Return the entry of `key`, expired or not, or None."""
        with self._database.read() as connection:
            row = connection.execute(f"SELECT {COLUMNS} FROM entries WHERE key = ?", (key,)).fetchone()
        return None if row is None else read_entry(row)

    def holds(self, keys: Sequence[str], now: float) -> list[bool]:
        """Return for each key whether it has an entry that has not expired."""
        query = "SELECT 1 FROM entries WHERE key = ? AND (expires_at IS NULL OR expires_at > ?)"
        with self._database.read() as connection:
            return [connection.execute(query, (key, now)).fetchone() is not None for key in keys]

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yield all keys and entries in the order of their keys, expired ones too."""
        after = ""
        query = f"SELECT key, {COLUMNS} FROM entries WHERE key > ? ORDER BY key LIMIT 1000"
        while True:
            with self._database.read() as connection:
                rows = connection.execute(query, (after,)).fetchall()
            yield from ((key, read_entry(row)) for key, *row in rows)
            if not rows:
                return
            after = rows[-1][0]

    def pinned_bytes(self) -> int:
        """Return the size of the files that may not be evicted."""
        with self._database.read() as connection:
            return counter(connection, "pinned_bytes")

    def expect(self, file: str, writer: str) -> None:
        """Note that `file` is about to lie in the folder without an entry."""
        with self._database.write(durable=False) as connection:
            connection.execute("INSERT OR REPLACE INTO pending VALUES (?, ?)", (file, writer))

    def add(
        self,
        key: str,
        entry: Entry,
        replaced: Entry | None,
        limit_bytes: int | None,
        writer: str,
        now: float = 0.0,
        wanted: Callable[[sqlite3.Connection], bool] | None = None,
    ) -> Dropped:
        """Give `key` its entry, and drop expired ones and the least recently used ones for room.

        Parameters
        ----------
        key : str
            The key.
        entry : Entry
            The entry, whose file lies in the folder and was expected.
        replaced : Entry, optional
            The damaged or expired entry that this one replaces. If another process has been quicker, its entry stays and this
            one's file is among the dropped.
        limit_bytes : int, optional
            Most bytes that all entries together may have.
        writer : str
            Who removes the dropped files.
        now : float
            The store's time.
        wanted : callable, optional
            Called in the transaction; if it returns False nothing is added, and the file is among the dropped.

        Returns
        -------
        Dropped
            What was dropped for room, and files without an entry.

        Raises
        ------
        StoreFullError
            If so much is pinned that there is no room.
        """
        dropped = Dropped()
        with self._database.write() as connection:
            if wanted is not None and not wanted(connection):
                dropped.files.append(entry.file)
                return dropped
            row = connection.execute("SELECT file FROM entries WHERE key = ?", (key,)).fetchone()
            if row is not None and (replaced is None or row[0] != replaced.file):
                dropped.files.append(entry.file)
                return dropped
            if row is not None:
                drop_entries(connection, [key], writer, dropped)
                dropped.keys.clear()
            insert_entry(connection, key, entry)
            expired = "SELECT key FROM entries WHERE expires_at <= ? AND key != ? ORDER BY expires_at LIMIT ?"
            old = [row[0] for row in connection.execute(expired, (now, key, _EXPIRED_A_TIME))]
            drop_entries(connection, old, writer, dropped)
            if limit_bytes is not None:
                make_room(connection, key, limit_bytes, writer, dropped)
            forget_old_deletions(connection)
        return dropped

    def add_many(self, entries: Iterable[tuple[str, Entry]]) -> list[str]:
        """Give keys their entries in one transaction, whatever room they take; return the files of those that had one already."""
        taken = []
        with self._database.write() as connection:
            for key, entry in entries:
                if connection.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone() is None:
                    insert_entry(connection, key, entry)
                else:
                    taken.append(entry.file)
        return taken

    def transact(self, deed: Callable[[sqlite3.Connection], bool]) -> bool:
        """Run a transaction that changes no entry, and return what it returns."""
        with self._database.write() as connection:
            return deed(connection)

    def prolong(self, keys: Sequence[str], expires_at: float | None) -> None:
        """Let entries live until `expires_at` at least, for ever if that is None; the longest life asked for counts."""
        until = float("inf") if expires_at is None else expires_at
        with self._database.read() as connection:
            query = "SELECT 1 FROM entries WHERE key = ? AND expires_at < ?"
            shorter = [key for key in keys if connection.execute(query, (key, until)).fetchone()]
        if shorter:
            with self._database.write() as connection:
                connection.executemany(
                    "UPDATE entries SET expires_at = ? WHERE key = ? AND expires_at < ?",
                    ((expires_at, key, until) for key in shorter),
                )

    def drop(self, keys: Sequence[str], writer: str, file: str | None = None) -> Dropped:
        """Drop entries; with `file` only if that is still the entry's file."""
        dropped = Dropped()
        with self._database.write() as connection:
            if file is not None:
                query = "SELECT 1 FROM entries WHERE key = ? AND file = ?"
                keys = [key for key in keys if connection.execute(query, (key, file)).fetchone()]
            drop_entries(connection, keys, writer, dropped)
        return dropped

    def drop_expired(self, now: float, limit: int, writer: str) -> Dropped:
        """Drop at most `limit` expired entries."""
        dropped = Dropped()
        with self._database.write() as connection:
            query = "SELECT key FROM entries WHERE expires_at <= ? ORDER BY expires_at LIMIT ?"
            drop_entries(connection, [row[0] for row in connection.execute(query, (now, limit))], writer, dropped)
            forget_old_deletions(connection)
        return dropped

    def drop_nameless(self, keys: Sequence[str], before: float, writer: str) -> Dropped:
        """Drop those of `keys` that no name leads to and that were added before that time."""
        dropped = Dropped()
        query = (
            "SELECT 1 FROM entries WHERE key = ? AND added_at < ? AND NOT pinned "
            "AND NOT EXISTS (SELECT 1 FROM nodes WHERE nodes.key = entries.key)"
        )
        with self._database.write() as connection:
            nameless = [key for key in keys if connection.execute(query, (key, before)).fetchone()]
            drop_entries(connection, nameless, writer, dropped)
            forget_old_deletions(connection)
        return dropped

    def clear(self, writer: str, tenant: str | None = None) -> Dropped:
        """Drop all entries and all names, or those of one tenant."""
        dropped = Dropped()
        with self._database.write() as connection:
            if tenant is None:
                keys = connection.execute("SELECT key FROM entries").fetchall()
                # KV may be in RAM alone or in a remote tier, without an entry.
                dropped.keys += [key for (key,) in connection.execute("SELECT DISTINCT key FROM nodes")]
                connection.execute("DELETE FROM nodes")
            else:
                keys = connection.execute("SELECT key FROM entries WHERE tenant = ?", (tenant,)).fetchall()
                query = (
                    "SELECT seq, key FROM nodes LEFT JOIN namespaces USING (namespace) "
                    "WHERE ifnull(namespaces.tenant, '') = ?"
                )
                nodes = connection.execute(query, (tenant,)).fetchall()
                connection.executemany("DELETE FROM nodes WHERE seq = ?", ((seq,) for seq, _ in nodes))
                dropped.keys += [key for _, key in nodes]
            drop_entries(connection, [key for (key,) in keys], writer, dropped)
            forget_old_deletions(connection)
        return dropped

    def touch(self, keys: Sequence[str], wait: bool) -> None:
        """Mark entries as used in this order, the last one latest; without `wait` an error if another process is writing."""
        with self._database.write(durable=False, wait=wait) as connection:
            clock = advance_clock(connection, len(keys)) - len(keys)
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
            return last_deletion(connection)

    def deleted_since(self, seen: int) -> list[str] | None:
        """Return the keys dropped after `deletions` was `seen`, or None if that is too long ago to know."""
        with self._database.read() as connection:
            first = connection.execute("SELECT min(seq) FROM deletions").fetchone()[0]
            if first is not None and first > seen + 1:
                return None
            return [row[0] for row in connection.execute("SELECT key FROM deletions WHERE seq > ?", (seen,))]
