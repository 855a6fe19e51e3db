"""The rows of the index: what is known of the KV of one chunk on disk, and what is done to rows in a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cacheblend_rag.errors import StoreFullError

__all__ = [
    "COLUMNS",
    "Dropped",
    "Entry",
    "advance_clock",
    "claim",
    "counter",
    "drop_entries",
    "forget_old_deletions",
    "insert_entry",
    "last_deletion",
    "make_room",
    "read_entry",
]

# Other processes that saw fewer deletions than are kept look through all they hold.
_DELETIONS_KEPT = 4096
COLUMNS = "file, bytes, digest, tenant, added_at, expires_at"


@dataclass(frozen=True, slots=True)
class Entry:
    """The KV of one chunk on disk.

    Attributes
    ----------
    file : str
        Its file's name.
    nbytes : int
        The file's size.
    digest : bytes
        The file's header digest.
    tenant : str
        Whose it is; "" for nobody's in particular.
    added_at : float
        When it was added, by the store's time.
    expires_at : float or None
        From when on it counts as a miss, by the store's time.
    """

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
    """What a transaction dropped: keys without KV now, and files to be removed, then settled with `Index.settle`.

    `pinned` are the keys that pinned names lead to since then.
    """

    keys: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    pinned: list[str] = field(default_factory=list)


def claim(connection: sqlite3.Connection, tenant: str) -> None:
    """Give a tenant its row, in a transaction that has begun."""
    connection.execute("INSERT OR IGNORE INTO tenants VALUES (?, 0, 0, 0)", (tenant,))


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
    row = connection.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
    return 0 if row is None else int(row[0])


def read_entry(row: Sequence[Any]) -> Entry:
    """Return the entry in a row of `COLUMNS`."""
    file, nbytes, digest, tenant, added_at, expires_at = row
    # In a damaged database a value may even have another type. What then expires is a miss.
    if not isinstance(expires_at, float | int | None):
        expires_at = 0.0
    return Entry(str(file), nbytes, digest, str(tenant), added_at, expires_at)


def insert_entry(connection: sqlite3.Connection, key: str, entry: Entry) -> None:
    """Give a key its entry, pinned if a pinned name leads to it."""
    claim(connection, entry.tenant)
    connection.execute(
        "INSERT INTO entries (key, file, bytes, digest, last_used, tenant, added_at, expires_at, pinned) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, EXISTS (SELECT 1 FROM nodes WHERE nodes.key = ? AND nodes.pinned))",
        (
            key,
            entry.file,
            entry.nbytes,
            entry.digest,
            advance_clock(connection, 1),
            entry.tenant,
            entry.added_at,
            entry.expires_at,
            key,
        ),
    )
    connection.execute("DELETE FROM pending WHERE file = ?", (entry.file,))


def make_room(connection: sqlite3.Connection, key: str, limit_bytes: int, writer: str, dropped: Dropped) -> None:
    """Drop the least recently used entries, but none that is pinned nor `key`, until all together have at most `limit_bytes`."""
    over = counter(connection, "entry_bytes") - limit_bytes
    victims = []
    query = "SELECT key, bytes FROM entries WHERE pinned = 0 AND key != ? ORDER BY last_used"
    oldest = connection.execute(query, (key,))
    while over > 0 and (victim := oldest.fetchone()) is not None:
        victims.append(victim[0])
        over -= victim[1]
    oldest.close()
    if over > 0:
        raise StoreFullError(
            f"pinned KV takes {counter(connection, 'pinned_bytes')} bytes of the store's budget of {limit_bytes} (disk_bytes), "
            f"and {over} bytes are wanting; unpin some, or raise the budget"
        )
    drop_entries(connection, victims, writer, dropped)


def forget_old_deletions(connection: sqlite3.Connection) -> None:
    """Keep the latest deletions only."""
    connection.execute("DELETE FROM deletions WHERE seq <= (SELECT max(seq) FROM deletions) - ?", (_DELETIONS_KEPT,))


def advance_clock(connection: sqlite3.Connection, steps: int) -> int:
    """Let the clock of uses go on, and return what it shows."""
    connection.execute("UPDATE counters SET value = value + ? WHERE name = 'clock'", (steps,))
    return counter(connection, "clock")


def last_deletion(connection: sqlite3.Connection) -> int:
    """Return the number of the latest deletion."""
    return int(connection.execute("SELECT ifnull(max(seq), 0) FROM deletions").fetchone()[0])
