"""The tables of the index, and what triggers keep in them."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from cacheblend_rag.errors import StoreFormatError

__all__ = ["MIRRORED", "check_version", "columns", "has_tables", "make_tables", "restart_sequences"]

_VERSION = 4

# The tables that the mirror repeats: the columns by which a row is found, and the others. When KV was last used is not worth it.
MIRRORED = {
    "namespaces": ("namespace", "tenant"),
    "nodes": ("namespace, id", "seq, key, text_hash, token_ids, checksum, pinned, separator"),
    "documents": ("number", "namespace, name, tokens, separator, checksum"),
    "members": ("seq", "document, arrival, start, previous, length, body, ends, expires_at, checksum"),
    "entries": ("key", "file, bytes, digest, tenant, added_at, expires_at, pinned"),
    "removals": ("file", ""),
    "origins": ("node, owner", "source"),
    "owed": ("key", ""),
    "shared": ("one", "birth, position"),
}

# entries: the chunks whose KV is on disk. removals: files that have lost their entry and are to be removed. deletions: the keys
# that lost their entry lately, for other processes' RAM.
# nodes: the names. changes: the numbers of those that changed lately; no ids, so that none outlives its name. namespaces: whose
# they are, where they are a tenant's. tenants: what each has, counted by triggers so that nobody has to count a million rows.
# documents: how those that chunks are pieces of are read. members: the pieces, by the numbers of their names.
# origins: which vector stores have the names, and what their texts were made of. owed: KV that waits for its name.
# shared: up to where the names that machines share are followed here, where they are.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, file TEXT NOT NULL, bytes INTEGER NOT NULL, digest BLOB NOT NULL, last_used INTEGER NOT NULL DEFAULT 0,
    tenant TEXT NOT NULL DEFAULT '', added_at REAL NOT NULL DEFAULT 0, expires_at REAL, pinned INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS removals (file TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS deletions (seq INTEGER PRIMARY KEY, key TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS nodes (
    seq INTEGER PRIMARY KEY, namespace TEXT NOT NULL, id TEXT NOT NULL, key TEXT NOT NULL, text_hash TEXT NOT NULL,
    token_ids BLOB NOT NULL, checksum INTEGER NOT NULL, pinned INTEGER NOT NULL DEFAULT 0,
    separator BLOB NOT NULL DEFAULT x'', UNIQUE (namespace, id)
);
CREATE TABLE IF NOT EXISTS documents (
    number INTEGER PRIMARY KEY, namespace TEXT NOT NULL, name TEXT NOT NULL, tokens INTEGER, separator BLOB NOT NULL,
    checksum INTEGER NOT NULL, UNIQUE (namespace, name)
);
CREATE TABLE IF NOT EXISTS members (
    seq INTEGER PRIMARY KEY, document INTEGER NOT NULL, arrival INTEGER NOT NULL, start INTEGER, previous TEXT,
    length INTEGER NOT NULL, body TEXT NOT NULL, ends BLOB NOT NULL, expires_at REAL, checksum INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS origins (
    node INTEGER NOT NULL, owner TEXT NOT NULL, source TEXT NOT NULL, PRIMARY KEY (node, owner)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS owed (key TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS changes (seq INTEGER PRIMARY KEY, node INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS namespaces (namespace TEXT PRIMARY KEY, tenant TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tenants (
    tenant TEXT PRIMARY KEY, entries INTEGER NOT NULL, bytes INTEGER NOT NULL, names INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shared (one INTEGER PRIMARY KEY CHECK (one = 1), birth TEXT NOT NULL, position INTEGER NOT NULL);
INSERT OR IGNORE INTO counters VALUES ('entry_bytes', 0), ('pinned_bytes', 0), ('clock', 0), ('revision', 0), ('adopting', 0);
INSERT OR IGNORE INTO tenants VALUES ('', 0, 0, 0);
CREATE INDEX IF NOT EXISTS entries_by_use ON entries (pinned, last_used);
CREATE INDEX IF NOT EXISTS entries_by_expiry ON entries (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS nodes_by_key ON nodes (key);
CREATE INDEX IF NOT EXISTS members_by_document ON members (document, arrival);
CREATE INDEX IF NOT EXISTS origins_by_source ON origins (source, owner);
CREATE INDEX IF NOT EXISTS origins_by_owner ON origins (owner);
CREATE TRIGGER IF NOT EXISTS origin_lost AFTER DELETE ON nodes BEGIN
    DELETE FROM origins WHERE node = old.seq;
END;
CREATE TRIGGER IF NOT EXISTS debt_paid AFTER INSERT ON nodes BEGIN
    DELETE FROM owed WHERE key = new.key;
END;
CREATE TRIGGER IF NOT EXISTS debt_paid_late AFTER UPDATE OF key ON nodes BEGIN
    DELETE FROM owed WHERE key = new.key;
END;
CREATE TRIGGER IF NOT EXISTS debt_dropped AFTER DELETE ON entries BEGIN
    DELETE FROM owed WHERE key = old.key;
END;
CREATE TRIGGER IF NOT EXISTS piece_removed AFTER DELETE ON nodes BEGIN
    DELETE FROM members WHERE seq = old.seq;
END;
CREATE TRIGGER IF NOT EXISTS document_ended AFTER DELETE ON members BEGIN
    DELETE FROM documents WHERE number = old.document AND NOT EXISTS (SELECT 1 FROM members WHERE document = old.document);
END;
CREATE TRIGGER IF NOT EXISTS entry_added AFTER INSERT ON entries BEGIN
    UPDATE counters SET value = value + new.bytes WHERE name = 'entry_bytes';
    UPDATE counters SET value = value + new.bytes WHERE name = 'pinned_bytes' AND new.pinned;
    UPDATE tenants SET entries = entries + 1, bytes = bytes + new.bytes WHERE tenant = new.tenant;
END;
CREATE TRIGGER IF NOT EXISTS entry_deleted AFTER DELETE ON entries BEGIN
    UPDATE counters SET value = value - old.bytes WHERE name = 'entry_bytes';
    UPDATE counters SET value = value - old.bytes WHERE name = 'pinned_bytes' AND old.pinned;
    UPDATE tenants SET entries = entries - 1, bytes = bytes - old.bytes WHERE tenant = old.tenant;
    INSERT INTO deletions (key) VALUES (old.key);
END;
CREATE TRIGGER IF NOT EXISTS entry_pinned AFTER UPDATE OF pinned ON entries BEGIN
    UPDATE counters SET value = value + (new.pinned - old.pinned) * new.bytes WHERE name = 'pinned_bytes';
END;
CREATE TRIGGER IF NOT EXISTS entry_claimed AFTER UPDATE OF tenant ON entries BEGIN
    UPDATE tenants SET entries = entries - 1, bytes = bytes - old.bytes WHERE tenant = old.tenant;
    UPDATE tenants SET entries = entries + 1, bytes = bytes + new.bytes WHERE tenant = new.tenant;
END;
CREATE TRIGGER IF NOT EXISTS node_added AFTER INSERT ON nodes BEGIN
    UPDATE tenants SET names = names + 1 WHERE tenant =
        ifnull((SELECT tenant FROM namespaces WHERE namespace = new.namespace), '');
END;
CREATE TRIGGER IF NOT EXISTS node_removed AFTER DELETE ON nodes BEGIN
    UPDATE tenants SET names = names - 1 WHERE tenant =
        ifnull((SELECT tenant FROM namespaces WHERE namespace = old.namespace), '');
END;
CREATE TRIGGER IF NOT EXISTS node_addition_noted AFTER INSERT ON nodes BEGIN
    INSERT INTO changes (node) VALUES (new.seq);
END;
CREATE TRIGGER IF NOT EXISTS node_change_noted AFTER UPDATE OF key, text_hash, token_ids ON nodes BEGIN
    INSERT INTO changes (node) VALUES (new.seq);
END;
CREATE TRIGGER IF NOT EXISTS node_removal_noted AFTER DELETE ON nodes BEGIN
    INSERT INTO changes (node) VALUES (old.seq);
END;
CREATE TRIGGER IF NOT EXISTS changes_forgotten AFTER INSERT ON changes BEGIN
    DELETE FROM changes WHERE seq <= new.seq - 10000;
END;
CREATE TRIGGER IF NOT EXISTS node_pinned AFTER UPDATE OF key, pinned ON nodes WHEN old.pinned OR new.pinned BEGIN
    UPDATE entries SET pinned = EXISTS (SELECT 1 FROM nodes WHERE nodes.key = entries.key AND nodes.pinned)
    WHERE key IN (old.key, new.key);
END;
CREATE TRIGGER IF NOT EXISTS pinned_node_removed AFTER DELETE ON nodes WHEN old.pinned BEGIN
    UPDATE entries SET pinned = EXISTS (SELECT 1 FROM nodes WHERE nodes.key = entries.key AND nodes.pinned)
    WHERE key = old.key;
END;
"""

# With every row that changes and is mirrored the revision is raised, whoever changes it: a program that knows of no mirror is
# then seen to have been here.
_COUNTED = "".join(
    f"CREATE TRIGGER IF NOT EXISTS {table}_{name}_counted AFTER {change} ON {table} BEGIN\n"
    "    UPDATE counters SET value = value + 1 WHERE name = 'revision';\nEND;\n"
    for table, parts in MIRRORED.items()
    for name, change in (
        ("insert", "INSERT"),
        ("delete", "DELETE"),
        ("update", f"UPDATE OF {', '.join(part for part in parts if part)}"),
    )
)


def columns(table: str) -> list[str]:
    """Return the columns of a table that the mirror repeats."""
    return [column for part in MIRRORED[table] for column in part.split(", ") if column]


def make_tables(connection: sqlite3.Connection) -> None:
    """Make the tables and triggers that are not there, in a transaction that has begun."""
    for statement in _statements(_SCHEMA + _COUNTED):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {_VERSION}")


def has_tables(connection: sqlite3.Connection) -> bool:
    """Return whether all tables and triggers are there."""
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    return names.issuperset(re.findall(r"IF NOT EXISTS (\w+)", _SCHEMA + _COUNTED))


def check_version(connection: sqlite3.Connection, path: Path | None) -> None:
    """Raise `StoreFormatError` if an index that is not empty was written by another version."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    is_empty = version == 0 and not connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    if version != _VERSION and not is_empty:
        raise StoreFormatError(
            f"index {path} is in format version {version}, but this cacheblend-rag reads version {_VERSION}; remove the store "
            "folder and warm it again (its KV is recomputed), or use the cacheblend-rag that wrote it"
        )


def restart_sequences(connection: sqlite3.Connection) -> None:
    """Let the numbers of changes and deletions begin above all that another index in this place gave out."""
    first = time.time_ns() // 1_000_000
    connection.execute("INSERT OR REPLACE INTO changes (seq, node) VALUES (?, 0)", (first,))
    connection.execute("INSERT OR REPLACE INTO deletions (seq, key) VALUES (?, '')", (first,))


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
