"""The index of a store: which KV is in which file, which tenant owns it, and what was dropped."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from cacheblend_rag.errors import StoreFullError
from cacheblend_rag.store.database import Database

__all__ = ["AT_ONCE", "Dropped", "Entry", "Index", "claim", "counter", "drop_entries"]

# Other processes that saw fewer deletions than are kept look through all they hold.
_DELETIONS_KEPT = 4096
# Expired entries dropped on the way by one addition, and as many that nobody has named; `gc` drops the others.
_OLD_A_TIME = 64
AT_ONCE = 200
"""So many rows are asked for in one query; SQLite takes 999 values in one."""

_COLUMNS = "bytes, tenant, added_at, expires_at"


@dataclass(frozen=True, slots=True)
class Entry:
    """The KV of one chunk on disk: its file's size, whose it is, and since and until when."""

    nbytes: int
    tenant: str = ""
    added_at: float = 0.0
    expires_at: float | None = None

    def is_live(self, now: float) -> bool:
        """Return whether it has not expired."""
        return self.expires_at is None or self.expires_at > now


@dataclass(slots=True)
class Dropped:
    """What a transaction dropped: keys without KV now, whose entries they had, and whether that was for the budget's room."""

    keys: list[str] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)
    for_room: bool = False


class Index:
    """The entries in a database; each method is one transaction, and the files of what it drops go with that."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def entry(self, key: str) -> Entry | None:
        """Return the entry of `key`, expired or not, or None."""
        with self.database.read() as connection:
            row = connection.execute(f"SELECT {_COLUMNS} FROM entries WHERE key = ?", (key,)).fetchone()
        return None if row is None else Entry(*row)

    def holds(self, keys: Sequence[str], now: float) -> list[bool]:
        """Return for each key whether it has an entry that has not expired."""
        held: set[str] = set()
        with self.database.read() as connection:
            for start in range(0, len(keys), AT_ONCE):
                some = keys[start : start + AT_ONCE]
                marks = ", ".join("?" * len(some))
                query = f"SELECT key FROM entries WHERE ifnull(expires_at > ?, 1) AND key IN ({marks})"
                held.update(row[0] for row in connection.execute(query, (now, *some)))
        return [key in held for key in keys]

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yield all keys and entries in the order of their keys, expired ones too."""
        query = f"SELECT key, {_COLUMNS} FROM entries WHERE key > ? ORDER BY key LIMIT 1000"
        return ((key, Entry(*row)) for key, *row in self.database.in_batches(query, ""))

    def pinned_bytes(self, tenant: str | None = None) -> int:
        """Return the size of the files that may not be evicted, or of those of one tenant."""
        query = "SELECT ifnull(sum(bytes), 0) FROM entries WHERE pinned = 1 AND tenant = ?"
        with self.database.read() as connection:
            if tenant is None:
                return counter(connection, "pinned_bytes")
            return int(connection.execute(query, (tenant,)).fetchone()[0])

    def pinned(self) -> set[str]:
        """Return the keys that pinned names lead to."""
        with self.database.read() as connection:
            return {row[0] for row in connection.execute("SELECT key FROM nodes WHERE pinned")}

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
        unnamed_before: float = -math.inf,
        wanted: Callable[[sqlite3.Connection], bool] | None = None,
        place: Callable[[], None] = lambda: None,
        wait: bool = True,
    ) -> Dropped:
        """Give `key` its entry, and drop what has expired, what nobody has named, and the least recently used for room.

        Nothing is added if another process has been quicker than the damaged or expired entry that is `replaced`, or if `wanted`,
        called in the transaction, returns False. `place` brings the file to its place.
        """
        dropped = Dropped()
        with self.database.write(wait) as connection:
            row = connection.execute(f"SELECT {_COLUMNS} FROM entries WHERE key = ?", (key,)).fetchone()
            is_quicker = row is not None and Entry(*row) != replaced
            if (wanted is not None and not wanted(connection)) or is_quicker:
                return dropped
            connection.execute("DELETE FROM entries WHERE key = ?", (key,))
            _insert(connection, key, entry)
            for query, moment in (
                (
                    "SELECT key FROM entries WHERE expires_at <= ? AND key != ? ORDER BY expires_at LIMIT ?",
                    entry.added_at,
                ),
                (
                    "SELECT key FROM entries WHERE NOT named AND added_at < ? AND NOT pinned AND key != ? LIMIT ?",
                    unnamed_before,
                ),
            ):
                old = [row[0] for row in connection.execute(query, (moment, key, _OLD_A_TIME))]
                drop_entries(connection, old, dropped)
            _make_room(connection, key, limit_bytes, dropped)
            _forget_old_deletions(connection)
            place()
        return dropped

    def prolong(self, keys: Sequence[str], expires_at: float | None, now: float) -> None:
        """Let entries that have not expired by `now` live until `expires_at` at least, for ever if that is None.

        The longest life asked for counts, the first one of KV that was found by its file.
        """
        until = math.inf if expires_at is None else expires_at
        with self.database.read() as connection:
            query = "SELECT 1 FROM entries WHERE key = ? AND (found OR expires_at > ? AND expires_at < ?)"
            others = [key for key in keys if connection.execute(query, (key, now, until)).fetchone()]
        if others:
            with self.database.write() as connection:
                connection.executemany(
                    "UPDATE entries SET expires_at = ?, found = 0 WHERE key = ? AND (found OR expires_at > ? AND expires_at < ?)",
                    ((expires_at, key, now, until) for key in others),
                )

    def drop(self, keys: Sequence[str], wait: bool = True) -> Dropped:
        """Drop entries."""
        dropped = Dropped()
        with self.database.write(wait) as connection:
            drop_entries(connection, keys, dropped)
            _forget_old_deletions(connection)
        return dropped

    def expired(self, now: float, limit: int) -> list[str]:
        """Return the keys of at most `limit` expired entries."""
        query = "SELECT key FROM entries WHERE expires_at <= ? ORDER BY expires_at LIMIT ?"
        with self.database.read() as connection:
            return [row[0] for row in connection.execute(query, (now, limit))]

    def unnamed(self, before: float, limit: int) -> list[str]:
        """Return the keys of at most `limit` entries that no name leads to and that were added before that time."""
        query = "SELECT key FROM entries WHERE NOT named AND added_at < ? AND NOT pinned LIMIT ?"
        with self.database.read() as connection:
            return [row[0] for row in connection.execute(query, (before, limit))]

    def oldest(self, nbytes: int, spared: Collection[str]) -> list[str]:
        """Return the keys of entries to drop for room: what no name leads to first, then the least recently used, none pinned."""
        with self.database.read() as connection:
            victims, nbytes = _oldest(connection, spared, nbytes, "AND NOT named")
            return victims + _oldest(connection, spared, nbytes, "AND named")[0]

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
        row = connection.execute("DELETE FROM entries WHERE key = ? RETURNING tenant", (key,)).fetchone()
        if row is not None:
            dropped.keys.append(key)
            dropped.tenants.append(row[0])


def _insert(connection: sqlite3.Connection, key: str, entry: Entry) -> None:
    """Give a key its entry, pinned if a pinned name leads to it."""
    claim(connection, entry.tenant)
    used = _advance_clock(connection, 1)
    connection.execute(
        "INSERT INTO entries (key, bytes, last_used, tenant, added_at, expires_at, pinned, named) VALUES (?1, ?2, ?3, ?4, ?5, "
        "?6, EXISTS (SELECT 1 FROM nodes WHERE key = ?1 AND pinned), EXISTS (SELECT 1 FROM nodes WHERE key = ?1))",
        (key, entry.nbytes, used, entry.tenant, entry.added_at, entry.expires_at),
    )


def _make_room(connection: sqlite3.Connection, key: str, limit_bytes: int, dropped: Dropped) -> None:
    """Drop the least recently used entries, but none that is pinned nor `key`, until all together have at most `limit_bytes`."""
    victims, over = _oldest(connection, [key], counter(connection, "entry_bytes") - limit_bytes)
    if over > 0:
        raise StoreFullError(
            f"pinned KV leaves too little of the store's budget of {limit_bytes} bytes (disk_bytes); unpin some, or raise the "
            "budget"
        )
    drop_entries(connection, victims, dropped)
    dropped.for_room = bool(victims)


def _oldest(
    connection: sqlite3.Connection, spared: Collection[str], nbytes: int, condition: str = ""
) -> tuple[list[str], int]:
    """Return the keys of the least recently used entries of so many bytes that may be dropped, and the bytes still wanting."""
    victims = []
    oldest = connection.execute(f"SELECT key, bytes FROM entries WHERE pinned = 0 {condition} ORDER BY last_used")
    while nbytes > 0 and (victim := oldest.fetchone()) is not None:
        if victim[0] not in spared:
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
