"""The index of a store: which KV is in which file, which tenant owns it, and what was dropped."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cacheblend_rag.errors import StoreFullError
from cacheblend_rag.store.database import Database, healing

__all__ = ["Dropped", "Entry", "Index", "claim", "counter", "drop_entries"]

# Other processes that saw fewer deletions than are kept look through all they hold.
_DELETIONS_KEPT = 4096
# Expired entries dropped on the way by one addition; `gc` drops the others.
_EXPIRED_A_TIME = 64
_COLUMNS = "file, bytes, digest, tenant, added_at, expires_at"


@dataclass(frozen=True, slots=True)
class Entry:
    """The KV of one chunk on disk: its file, that file's size and header digest, whose it is, and since and until when."""

    file: str
    nbytes: int
    digest: bytes
    tenant: str = ""
    added_at: float = 0.0
    expires_at: float | None = None

    def is_live(self, now: float) -> bool:
        """Return whether it has not expired."""
        return self.expires_at is None or self.expires_at > now


@dataclass(slots=True)
class Dropped:
    """What a transaction dropped: keys without KV now, whose entries those were, and files to be removed, then settled with
    `Index.settle`.

    `pinned` are the keys that pinned names lead to since then; `for_room` says whether the byte budget had no room for some.
    """

    keys: list[str] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    pinned: list[str] = field(default_factory=list)
    for_room: bool = False


@healing("database")
class Index:
    """The entries in a database; each method is one transaction. What is dropped is to be removed by the caller."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def entry(self, key: str) -> Entry | None:
        """Return the entry of `key`, expired or not, or None."""
        with self.database.read() as connection:
            row = connection.execute(f"SELECT {_COLUMNS} FROM entries WHERE key = ?", (key,)).fetchone()
        if row is None:
            self.database.doubt("entries", "key = ?", [(key,)])
        return None if row is None else _entry(row)

    def believed(self, key: str) -> Entry | None:
        """Return the entry of `key` once the mirror was asked, too: what it leads to is not what it says."""
        self.database.doubt("entries", "key = ?", [(key,)])
        return self.entry(key)

    def holds(self, keys: Sequence[str], now: float) -> list[bool]:
        """Return for each key whether it has an entry that has not expired."""
        query = "SELECT 1 FROM entries WHERE key = ? AND (expires_at IS NULL OR expires_at > ?)"
        with self.database.read() as connection:
            held = [connection.execute(query, (key, now)).fetchone() is not None for key in keys]
        self.database.doubt(
            "entries", "key = ?", [(key,) for key, is_held in zip(keys, held, strict=True) if not is_held]
        )
        return held

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yield all keys and entries in the order of their keys, expired ones too."""
        query = f"SELECT key, {_COLUMNS} FROM entries WHERE key > ? ORDER BY key LIMIT 1000"
        return ((key, _entry(row)) for key, *row in self.database.in_batches(query, ""))

    def pinned_bytes(self, tenant: str | None = None) -> int:
        """Return the size of the files that may not be evicted, or of those of one tenant."""
        query = "SELECT ifnull(sum(bytes), 0) FROM entries WHERE pinned = 1 AND tenant = ?"
        with self.database.read() as connection:
            if tenant is None:
                return counter(connection, "pinned_bytes")
            return int(connection.execute(query, (tenant,)).fetchone()[0])

    def held_bytes(self) -> int:
        """Return the size of all files."""
        with self.database.read() as connection:
            return counter(connection, "entry_bytes")

    def tenants(self) -> list[str]:
        """Return the tenants that have entries or names; "" stands for what has no tenant."""
        with self.database.read() as connection:
            query = "SELECT tenant FROM tenants WHERE entries OR names ORDER BY tenant"
            return [row[0] for row in connection.execute(query)]

    def share(self, tenant: str | None = None) -> tuple[int, int, int]:
        """Return the entries, their bytes and the names of a tenant, or of all."""
        query = (
            "SELECT ifnull(sum(entries), 0), ifnull(sum(bytes), 0), ifnull(sum(names), 0) FROM tenants "
            "WHERE ?1 IS NULL OR tenant = ?1"
        )
        with self.database.read() as connection:
            entries, nbytes, names = connection.execute(query, (tenant,)).fetchone()
        return int(entries), int(nbytes), int(names)

    def add(
        self,
        key: str,
        entry: Entry,
        replaced: Entry | None,
        limit_bytes: int,
        now: float = 0.0,
        wanted: Callable[[sqlite3.Connection], bool] | None = None,
    ) -> Dropped:
        """Give `key` its entry, and drop expired ones and the least recently used ones for room.

        The damaged or expired entry that is `replaced` goes. If another process has been quicker, its entry stays, and this
        one's file is among the dropped; so it is if `wanted`, called in the transaction, returns False.
        """
        dropped = Dropped()
        with self.database.write() as connection:
            row = connection.execute("SELECT file FROM entries WHERE key = ?", (key,)).fetchone()
            is_quicker = row is not None and (replaced is None or row[0] != replaced.file)
            if (wanted is not None and not wanted(connection)) or is_quicker:
                return Dropped(files=[entry.file])
            if row is not None:
                drop_entries(connection, [key], dropped)
                dropped.keys.clear()
                dropped.tenants.clear()
            _insert(connection, key, entry)
            expired = "SELECT key FROM entries WHERE expires_at <= ? AND key != ? ORDER BY expires_at LIMIT ?"
            old = [row[0] for row in connection.execute(expired, (now, key, _EXPIRED_A_TIME))]
            drop_entries(connection, old, dropped)
            _make_room(connection, key, limit_bytes, dropped)
            _forget_old_deletions(connection)
        return dropped

    def add_many(self, entries: Iterable[tuple[str, Entry]]) -> list[str]:
        """Give keys their entries in one transaction, whatever room they take; return the files of those that have another.

        They belong to the tenant of the names that lead to them.
        """
        taken = []
        owner = "SELECT tenant FROM nodes JOIN namespaces USING (namespace) WHERE key = ? LIMIT 1"
        with self.database.write() as connection:
            for key, entry in entries:
                row = connection.execute("SELECT file FROM entries WHERE key = ?", (key,)).fetchone()
                if row is None:
                    named = connection.execute(owner, (key,)).fetchone()
                    _insert(connection, key, entry if named is None else replace(entry, tenant=named[0]))
                elif row[0] != entry.file:
                    taken.append(entry.file)
        return taken

    def is_adopting(self) -> bool:
        """Return whether files without an entry are to get one."""
        with self.database.read() as connection:
            return counter(connection, "adopting") != 0

    def end_adopting(self) -> None:
        """Note that all have got one."""
        with self.database.write() as connection:
            connection.execute("UPDATE counters SET value = 0 WHERE name = 'adopting'")

    def prolong(self, keys: Sequence[str], expires_at: float | None) -> None:
        """Let entries live until `expires_at` at least, for ever if that is None; the longest life asked for counts."""
        until = float("inf") if expires_at is None else expires_at
        with self.database.read() as connection:
            query = "SELECT 1 FROM entries WHERE key = ? AND expires_at < ?"
            shorter = [key for key in keys if connection.execute(query, (key, until)).fetchone()]
        if shorter:
            with self.database.write() as connection:
                connection.executemany(
                    "UPDATE entries SET expires_at = ? WHERE key = ? AND expires_at < ?",
                    ((expires_at, key, until) for key in shorter),
                )

    def drop(self, keys: Sequence[str], file: str | None = None) -> Dropped:
        """Drop entries; with `file` only if that is still the entry's file."""
        query = "SELECT key FROM entries WHERE key = ?1 AND (?2 IS NULL OR file = ?2)"
        return self._drop_chosen(query, [(key, file) for key in keys])

    def drop_expired(self, now: float, limit: int) -> Dropped:
        """Drop at most `limit` expired entries."""
        query = "SELECT key FROM entries WHERE expires_at <= ? ORDER BY expires_at LIMIT ?"
        return self._drop_chosen(query, [(now, limit)])

    def drop_nameless(self, keys: Sequence[str], before: float) -> Dropped:
        """Drop those of `keys` that no name leads to and that were added before that time."""
        query = (
            "SELECT key FROM entries WHERE key = ? AND added_at < ? AND NOT pinned "
            "AND NOT EXISTS (SELECT 1 FROM nodes WHERE nodes.key = entries.key)"
        )
        return self._drop_chosen(query, [(key, before) for key in keys])

    def drop_for_room(self, nbytes: int, spared: str) -> Dropped:
        """Drop so many bytes: what no name leads to first, then the least recently used, but none that is pinned nor `spared`."""
        nameless = "AND NOT EXISTS (SELECT 1 FROM nodes WHERE nodes.key = entries.key)"
        dropped = Dropped()
        with self.database.write() as connection:
            for condition in (nameless, ""):
                victims, nbytes = _oldest(connection, spared, nbytes, condition)
                drop_entries(connection, victims, dropped)
            _forget_old_deletions(connection)
        return dropped

    def clear(self, tenant: str | None = None) -> Dropped:
        """Drop all entries and all names, or those of one tenant."""
        dropped = Dropped()
        with self.database.write() as connection:
            keys = connection.execute("SELECT key FROM entries WHERE ?1 IS NULL OR tenant = ?1", (tenant,)).fetchall()
            query = (
                "SELECT seq, key FROM nodes LEFT JOIN namespaces USING (namespace) "
                "WHERE ?1 IS NULL OR ifnull(namespaces.tenant, '') = ?1"
            )
            nodes = connection.execute(query, (tenant,)).fetchall()
            connection.executemany("DELETE FROM nodes WHERE seq = ?", ((seq,) for seq, _ in nodes))
            # KV may be in RAM alone or in a remote tier, without an entry.
            dropped.keys += dict.fromkeys(key for _, key in nodes)
            drop_entries(connection, [key for (key,) in keys], dropped)
            _forget_old_deletions(connection)
            # Of names that machines share, others may have recorded some of these meanwhile: all are read again.
            connection.execute("UPDATE shared SET birth = '', position = 0")
        return dropped

    def follows_others(self) -> bool:
        """Return whether its names are a copy of those that machines share."""
        with self.database.read() as connection:
            return connection.execute("SELECT 1 FROM shared").fetchone() is not None

    def touch(self, keys: Sequence[str], wait: bool) -> None:
        """Mark entries as used in this order, the last one latest; without `wait` an error if another process is writing."""
        with self.database.write(wait=wait) as connection:
            clock = _advance_clock(connection, len(keys)) - len(keys)
            connection.executemany(
                "UPDATE entries SET last_used = ? WHERE key = ?", ((clock + 1 + n, key) for n, key in enumerate(keys))
            )

    def removals(self) -> list[str]:
        """Return the files that have lost their entry and may still be there."""
        with self.database.read() as connection:
            return [row[0] for row in connection.execute("SELECT file FROM removals")]

    def is_removed(self, file: str) -> bool:
        """Return whether `file` has lost its entry and may still be there."""
        with self.database.read() as connection:
            return connection.execute("SELECT 1 FROM removals WHERE file = ?", (file,)).fetchone() is not None

    def has_file(self, file: str, key: str) -> bool:
        """Return whether `file` is the one of the entry of `key`."""
        entry = self.entry(key)
        return entry is not None and entry.file == file

    def settle(self, files: Iterable[str]) -> None:
        """Note that these files are gone."""
        with self.database.write() as connection:
            connection.executemany("DELETE FROM removals WHERE file = ?", ((file,) for file in files))

    def deletions(self) -> int:
        """Return a number that grows whenever an entry is dropped, by any process."""
        with self.database.read() as connection:
            return int(connection.execute("SELECT ifnull(max(seq), 0) FROM deletions").fetchone()[0])

    def dropped_lately(self, keys: Sequence[str]) -> set[str]:
        """Return those of the keys that lost their entry lately."""
        marks = ", ".join("?" * len(keys))
        with self.database.read() as connection:
            return {row[0] for row in connection.execute(f"SELECT key FROM deletions WHERE key IN ({marks})", keys)}

    def deleted_since(self, seen: int) -> list[str] | None:
        """Return the keys dropped after `deletions` was `seen`, or None if that is too long ago to know."""
        with self.database.read() as connection:
            first = connection.execute("SELECT min(seq) FROM deletions").fetchone()[0]
            if first is not None and first > seen + 1:
                return None
            return [row[0] for row in connection.execute("SELECT key FROM deletions WHERE seq > ?", (seen,))]

    def _drop_chosen(self, query: str, values: Sequence[Sequence[Any]]) -> Dropped:
        """Drop the entries whose keys a query yields with any of these values."""
        dropped = Dropped()
        with self.database.write() as connection:
            keys = [row[0] for each in values for row in connection.execute(query, each).fetchall()]
            drop_entries(connection, keys, dropped)
            _forget_old_deletions(connection)
        return dropped


# In a transaction that has begun


def claim(connection: sqlite3.Connection, tenant: str) -> None:
    """Give a tenant its row."""
    connection.execute("INSERT OR IGNORE INTO tenants VALUES (?, 0, 0, 0)", (tenant,))


def counter(connection: sqlite3.Connection, name: str) -> int:
    """Return the value of a counter."""
    row = connection.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
    return 0 if row is None else int(row[0])


def drop_entries(connection: sqlite3.Connection, keys: Iterable[str], dropped: Dropped) -> None:
    """Drop entries, and add them to `dropped`."""
    for key in keys:
        row = connection.execute("SELECT file, tenant FROM entries WHERE key = ?", (key,)).fetchone()
        if row is not None:
            connection.execute("INSERT OR REPLACE INTO removals VALUES (?)", (row[0],))
            connection.execute("DELETE FROM entries WHERE key = ?", (key,))
            dropped.keys.append(key)
            dropped.files.append(row[0])
            dropped.tenants.append(str(row[1]))


def _entry(row: Sequence[Any]) -> Entry:
    file, nbytes, digest, tenant, added_at, expires_at = row
    # In a damaged database a value may even have another type. What then expires is a miss.
    if not isinstance(expires_at, float | int | None):
        expires_at = 0.0
    return Entry(str(file), nbytes, digest, str(tenant), added_at, expires_at)


def _insert(connection: sqlite3.Connection, key: str, entry: Entry) -> None:
    """Give a key its entry, pinned if a pinned name leads to it."""
    claim(connection, entry.tenant)
    used = _advance_clock(connection, 1)
    connection.execute(
        "INSERT INTO entries (key, file, bytes, digest, last_used, tenant, added_at, expires_at, pinned) "
        "VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, EXISTS (SELECT 1 FROM nodes WHERE nodes.key = ?1 AND nodes.pinned))",
        (key, entry.file, entry.nbytes, entry.digest, used, entry.tenant, entry.added_at, entry.expires_at),
    )


def _make_room(connection: sqlite3.Connection, key: str, limit_bytes: int, dropped: Dropped) -> None:
    """Drop the least recently used entries, but none that is pinned nor `key`, until all together have at most `limit_bytes`."""
    victims, over = _oldest(connection, key, counter(connection, "entry_bytes") - limit_bytes)
    if over > 0:
        raise StoreFullError(
            f"pinned KV leaves too little of the store's budget of {limit_bytes} bytes (disk_bytes); unpin some, or raise the "
            "budget"
        )
    drop_entries(connection, victims, dropped)
    dropped.for_room = bool(victims)


def _oldest(connection: sqlite3.Connection, spared: str, nbytes: int, condition: str = "") -> tuple[list[str], int]:
    """Return the keys of the least recently used entries of so many bytes that may be dropped, and the bytes still wanting."""
    victims = []
    query = f"SELECT key, bytes FROM entries WHERE pinned = 0 AND key != ? {condition} ORDER BY last_used"
    oldest = connection.execute(query, (spared,))
    while nbytes > 0 and (victim := oldest.fetchone()) is not None:
        victims.append(victim[0])
        nbytes -= victim[1]
    oldest.close()
    return victims, nbytes


def _forget_old_deletions(connection: sqlite3.Connection) -> None:
    connection.execute("DELETE FROM deletions WHERE seq <= (SELECT max(seq) FROM deletions) - ?", (_DELETIONS_KEPT,))


def _advance_clock(connection: sqlite3.Connection, steps: int) -> int:
    """Let the clock of uses go on, and return what it shows."""
    connection.execute("UPDATE counters SET value = value + ? WHERE name = 'clock'", (steps,))
    return counter(connection, "clock")
