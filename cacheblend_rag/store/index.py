"""The index of a store: its tables, which KV is in which file, which tenant owns it, and what was dropped."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from cacheblend_rag.store.base import Entry
from cacheblend_rag.store.database import Database

__all__ = ["Dropped", "Index", "claim", "drop_entries"]

# Expired entries dropped on the way by one addition; `gc` drops the others.
_OLD_A_TIME = 64

_COLUMNS = "tenant, expires_at, bytes, added_at"
_EXPIRED = "SELECT key FROM entries WHERE expires_at <= ? ORDER BY expires_at LIMIT ?"

# entries: the chunks whose KV is on disk. deletions: the keys that lost their entry lately, for
# other processes' RAM.
# nodes: the names, with their documents, to which they came in the order of their numbers. changes: the numbers of those that
# changed lately; no ids, so that none outlives its name. namespaces: whose they are, where they are a tenant's.
# tenants: what each has, counted by triggers so that no call counts a million rows.
# seen: the chunks whose text is in what a chunk's later KV was read behind, by their numbers; what has seen one goes with it.
# shared: up to where the names that machines share are followed here, where they are.
# The numbers of changes and deletions begin above all that another index in this place gave out.
_SCHEMA = """
CREATE TABLE entries (
    key TEXT PRIMARY KEY, bytes INTEGER NOT NULL, last_used INTEGER NOT NULL DEFAULT 0, tenant TEXT NOT NULL DEFAULT '',
    added_at REAL NOT NULL, expires_at REAL
) WITHOUT ROWID;
CREATE TABLE deletions (seq INTEGER PRIMARY KEY, key TEXT NOT NULL);
CREATE TABLE nodes (
    seq INTEGER PRIMARY KEY, namespace TEXT NOT NULL, id TEXT NOT NULL, key TEXT NOT NULL, text_hash TEXT NOT NULL,
    token_ids BLOB NOT NULL, separator BLOB NOT NULL, document TEXT, start INTEGER, length INTEGER NOT NULL, ends BLOB NOT NULL,
    later TEXT, behind BLOB, UNIQUE (namespace, id)
);
CREATE TABLE seen (seq INTEGER NOT NULL, other INTEGER NOT NULL, PRIMARY KEY (seq, other)) WITHOUT ROWID;
CREATE TABLE changes (seq INTEGER PRIMARY KEY, node INTEGER NOT NULL);
CREATE TABLE namespaces (namespace TEXT PRIMARY KEY, tenant TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE tenants (
    tenant TEXT PRIMARY KEY, entries INTEGER NOT NULL, bytes INTEGER NOT NULL, names INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE shared (one INTEGER PRIMARY KEY CHECK (one = 1), birth TEXT NOT NULL, position INTEGER NOT NULL);
INSERT INTO tenants VALUES ('', 0, 0, 0);
INSERT INTO changes VALUES (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER), 0);
INSERT INTO deletions VALUES (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER), '');
CREATE INDEX entries_by_use ON entries (last_used);
CREATE INDEX entries_by_expiry ON entries (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX nodes_by_key ON nodes (key);
CREATE INDEX nodes_by_later ON nodes (later) WHERE later IS NOT NULL;
CREATE INDEX seen_by_other ON seen (other);
CREATE INDEX nodes_by_document ON nodes (namespace, document) WHERE document IS NOT NULL;
CREATE TRIGGER seen_changed AFTER UPDATE OF key ON nodes WHEN old.key != new.key BEGIN
    UPDATE nodes SET later = NULL, behind = NULL WHERE seq IN (SELECT seq FROM seen WHERE other = new.seq);
    DELETE FROM seen WHERE other = new.seq;
END;
CREATE TRIGGER seen_removed AFTER DELETE ON nodes BEGIN
    UPDATE nodes SET later = NULL, behind = NULL WHERE seq IN (SELECT seq FROM seen WHERE other = old.seq);
    DELETE FROM seen WHERE other = old.seq;
    DELETE FROM seen WHERE seq = old.seq;
END;
CREATE TRIGGER later_changed AFTER UPDATE OF later ON nodes BEGIN
    DELETE FROM seen WHERE seq = new.seq;
END;
CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN
    UPDATE tenants SET entries = entries + 1, bytes = bytes + new.bytes WHERE tenant = new.tenant;
END;
CREATE TRIGGER entry_deleted AFTER DELETE ON entries BEGIN
    UPDATE tenants SET entries = entries - 1, bytes = bytes - old.bytes WHERE tenant = old.tenant;
    INSERT INTO deletions (key) VALUES (old.key);
END;
CREATE TRIGGER entry_claimed AFTER UPDATE OF tenant ON entries BEGIN
    UPDATE tenants SET entries = entries - 1, bytes = bytes - old.bytes WHERE tenant = old.tenant;
    UPDATE tenants SET entries = entries + 1, bytes = bytes + new.bytes WHERE tenant = new.tenant;
END;
CREATE TRIGGER node_added AFTER INSERT ON nodes BEGIN
    UPDATE tenants SET names = names + 1 WHERE tenant =
        ifnull((SELECT tenant FROM namespaces WHERE namespace = new.namespace), '');
END;
CREATE TRIGGER node_removed AFTER DELETE ON nodes BEGIN
    UPDATE tenants SET names = names - 1 WHERE tenant =
        ifnull((SELECT tenant FROM namespaces WHERE namespace = old.namespace), '');
END;
CREATE TRIGGER node_addition_noted AFTER INSERT ON nodes BEGIN
    INSERT INTO changes (node) VALUES (new.seq);
END;
CREATE TRIGGER node_change_noted AFTER UPDATE OF key, text_hash, token_ids ON nodes BEGIN
    INSERT INTO changes (node) VALUES (new.seq);
END;
CREATE TRIGGER node_removal_noted AFTER DELETE ON nodes BEGIN
    INSERT INTO changes (node) VALUES (old.seq);
END;
CREATE TRIGGER deletions_forgotten AFTER INSERT ON deletions BEGIN
    DELETE FROM deletions WHERE seq <= new.seq - 4096;
END;
CREATE TRIGGER changes_forgotten AFTER INSERT ON changes BEGIN
    DELETE FROM changes WHERE seq <= new.seq - 10000;
END;
"""


@dataclass(slots=True)
class Dropped:
    """What a transaction dropped: keys without KV now, whose entries they had, and whether that was for the budget's room."""

    keys: list[str] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)
    for_room: bool = False


class Index(Database):
    """The entries in the database; each method is one transaction, and the files of what it drops go with that."""

    version = 11
    schema = _SCHEMA

    def entry(self, key: str) -> Entry | None:
        found = self.rows(f"SELECT {_COLUMNS} FROM entries WHERE key = ?", key)
        return Entry(*found[0]) if found else None

    def holds(self, keys: Sequence[str], now: float) -> list[bool]:
        """Return for each key whether it has an entry that has not expired."""
        query = "SELECT key FROM entries WHERE ifnull(expires_at > ?, 1) AND key IN (SELECT value FROM json_each(?))"
        held = {key for (key,) in self.rows(query, now, json.dumps(keys))}
        return [key in held for key in keys]

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yield all keys and entries in the order of their keys, expired ones too, read a limited number at a time."""
        key = ""
        while found := self.rows(f"SELECT key, {_COLUMNS} FROM entries WHERE key > ? ORDER BY key LIMIT 1000", key):
            for key, *row in found:
                yield key, Entry(*row)

    def tenants(self) -> list[str]:
        """Return the tenants that have entries or names; "" stands for what has no tenant."""
        return [row[0] for row in self.rows("SELECT tenant FROM tenants WHERE entries OR names ORDER BY tenant")]

    def share(self, tenant: str | None = None) -> tuple[int, int, int]:
        """Return the entries, their bytes and the names of a tenant, or of all."""
        query = "SELECT ifnull(sum(entries), 0), ifnull(sum(bytes), 0), ifnull(sum(names), 0) FROM tenants "
        [(entries, nbytes, names)] = self.rows(query + "WHERE ?1 IS NULL OR tenant = ?1", tenant)
        return int(entries), int(nbytes), int(names)

    def add(
        self,
        key: str,
        entry: Entry,
        replaced: Entry | None,
        limit_bytes: int,
        place: Callable[[], None],
        wanted: Callable[[sqlite3.Connection], bool] | None = None,
    ) -> Dropped:
        """Give `key` its entry and file if it is `wanted` and still has what is `replaced`; drop what is old or in the way."""
        dropped = Dropped()
        with self.write() as connection:
            row = connection.execute(f"SELECT {_COLUMNS} FROM entries WHERE key = ?", (key,)).fetchone()
            is_quicker = row is not None and Entry(*row) != replaced
            if (wanted is not None and not wanted(connection)) or is_quicker:
                return dropped
            connection.execute("DELETE FROM entries WHERE key = ?", (key,))
            old = [row[0] for row in connection.execute(_EXPIRED, (entry.added_at, _OLD_A_TIME))]
            drop_entries(connection, old, dropped)
            claim(connection, entry.tenant)
            connection.execute(
                "INSERT INTO entries (key, bytes, last_used, tenant, added_at, expires_at) VALUES (?, ?, ?, ?, ?, ?)",
                (key, entry.nbytes, time.time_ns(), entry.tenant, entry.added_at, entry.expires_at),
            )
            _make_room(connection, key, limit_bytes, dropped)
            place()
        return dropped

    def prolong(self, keys: Sequence[str], expires_at: float | None, now: float) -> None:
        """Let live entries live until `expires_at` at least, None is for ever."""
        until = math.inf if expires_at is None else expires_at
        is_shorter = "key = ? AND expires_at > ? AND expires_at < ?"
        query = f"SELECT 1 FROM entries WHERE {is_shorter}"
        others = [key for key in keys if self.rows(query, key, now, until)]
        if others:
            with self.write() as connection:
                query = f"UPDATE entries SET expires_at = ? WHERE {is_shorter}"
                connection.executemany(query, ((expires_at, key, now, until) for key in others))

    def drop(self, keys: Sequence[str], wait: bool = True) -> Dropped:
        dropped = Dropped()
        with self.write(wait) as connection:
            drop_entries(connection, keys, dropped)
        return dropped

    def expired(self, now: float, limit: int) -> list[str]:
        return [key for (key,) in self.rows(_EXPIRED, now, limit)]

    def oldest(self, nbytes: int, spared: Collection[str]) -> list[str]:
        """Return the keys of entries of that many bytes to drop for room, the least recently used ones."""
        with self.read() as connection:
            return _oldest(connection, spared, nbytes)

    def clear(self, tenant: str | None = None) -> Dropped:
        """Drop all entries and all names, or those of one tenant."""
        dropped = Dropped()
        with self.write() as connection:
            keys = connection.execute("SELECT key FROM entries WHERE ?1 IS NULL OR tenant = ?1", (tenant,)).fetchall()
            query = (
                "SELECT seq, key, later FROM nodes LEFT JOIN namespaces USING (namespace) "
                "WHERE ?1 IS NULL OR ifnull(namespaces.tenant, '') = ?1"
            )
            nodes = connection.execute(query, (tenant,)).fetchall()
            connection.executemany("DELETE FROM nodes WHERE seq = ?", ((seq,) for seq, *_ in nodes))
            # KV may be in RAM alone or in a remote tier, without an entry.
            dropped.keys += dict.fromkeys(key for _, *both in nodes for key in both if key)
            drop_entries(connection, [key for (key,) in keys], dropped)
            # Of names that machines share, others may have recorded some of these meanwhile: all are read again.
            connection.execute("UPDATE shared SET birth = '', position = 0")
        return dropped

    def touch(self, keys: Sequence[str]) -> None:
        """Mark entries as used in this order, the last one latest; an error if another process is writing."""
        with self.write(wait=False, durable=False) as connection:
            used = enumerate(keys, time.time_ns() - len(keys))
            connection.executemany("UPDATE entries SET last_used = ? WHERE key = ?", used)

    def deletions(self) -> int:
        """Return a number that grows whenever an entry is dropped, by any process."""
        return int(self.rows("SELECT ifnull(max(seq), 0) FROM deletions")[0][0])

    def dropped_lately(self, keys: Sequence[str]) -> set[str]:
        query = "SELECT key FROM deletions WHERE key IN (SELECT value FROM json_each(?))"
        return {key for (key,) in self.rows(query, json.dumps(keys))}

    def deleted_since(self, seen: int) -> list[str] | None:
        """Return the keys dropped after `deletions` was `seen`, or None if that is too long ago to know."""
        first = self.rows("SELECT min(seq) FROM deletions")[0][0]
        if first is not None and first > seen + 1:
            return None
        return [key for (key,) in self.rows("SELECT key FROM deletions WHERE seq > ?", seen)]


# In a transaction that has begun


def claim(connection: sqlite3.Connection, tenant: str) -> None:
    """Give a tenant its row."""
    connection.execute("INSERT OR IGNORE INTO tenants VALUES (?, 0, 0, 0)", (tenant,))


def drop_entries(connection: sqlite3.Connection, keys: Iterable[str], dropped: Dropped) -> None:
    """Drop entries, and add them to `dropped`."""
    for key in keys:
        row = connection.execute("DELETE FROM entries WHERE key = ? RETURNING tenant", (key,)).fetchone()
        if row is not None:
            dropped.keys.append(key)
            dropped.tenants.append(row[0])


def _make_room(connection: sqlite3.Connection, key: str, limit_bytes: int, dropped: Dropped) -> None:
    """Drop the least recently used entries, but not `key`, until all together have at most `limit_bytes`."""
    (held_bytes,) = connection.execute("SELECT sum(bytes) FROM tenants").fetchone()
    victims = _oldest(connection, [key], held_bytes - limit_bytes)
    drop_entries(connection, victims, dropped)
    dropped.for_room = bool(victims)


def _oldest(connection: sqlite3.Connection, spared: Collection[str], nbytes: int) -> list[str]:
    victims = []
    oldest = connection.execute("SELECT key, bytes FROM entries ORDER BY last_used")
    while nbytes > 0 and (victim := oldest.fetchone()) is not None:
        if victim[0] not in spared:
            victims.append(victim[0])
            nbytes -= victim[1]
    oldest.close()
    return victims
