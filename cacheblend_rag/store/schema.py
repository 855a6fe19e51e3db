"""The tables of the index, and what triggers keep in them."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from cacheblend_rag.errors import StoreFormatError

__all__ = ["check_version", "make_tables"]

_VERSION = 5

# entries: the chunks whose KV is on disk, whether a name leads to it, and whether it was found by its file. deletions: the keys
# that lost their entry lately, for other processes' RAM.
# nodes: the names. changes: the numbers of those that changed lately; no ids, so that none outlives its name. namespaces: whose
# they are, where they are a tenant's. tenants: what each has, counted by triggers so that nobody has to count a million rows.
# documents: how those that chunks are pieces of are read. members: the pieces, by the numbers of their names.
# shared: up to where the names that machines share are followed here, where they are.
_SCHEMA = """
CREATE TABLE entries (
    key TEXT PRIMARY KEY, bytes INTEGER NOT NULL, last_used INTEGER NOT NULL DEFAULT 0, tenant TEXT NOT NULL DEFAULT '',
    added_at REAL NOT NULL, expires_at REAL, pinned INTEGER NOT NULL DEFAULT 0, named INTEGER NOT NULL DEFAULT 0,
    found INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE deletions (seq INTEGER PRIMARY KEY, key TEXT NOT NULL);
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE nodes (
    seq INTEGER PRIMARY KEY, namespace TEXT NOT NULL, id TEXT NOT NULL, key TEXT NOT NULL, text_hash TEXT NOT NULL,
    token_ids BLOB NOT NULL, separator BLOB NOT NULL, pinned INTEGER NOT NULL DEFAULT 0, source TEXT,
    indexed INTEGER NOT NULL DEFAULT 0, UNIQUE (namespace, id)
);
CREATE TABLE documents (
    number INTEGER PRIMARY KEY, namespace TEXT NOT NULL, name TEXT NOT NULL, tokens INTEGER, separator BLOB NOT NULL,
    UNIQUE (namespace, name)
);
CREATE TABLE members (
    seq INTEGER PRIMARY KEY, document INTEGER NOT NULL, arrival INTEGER NOT NULL, start INTEGER, previous TEXT,
    length INTEGER NOT NULL, body TEXT NOT NULL, ends BLOB NOT NULL, expires_at REAL
);
CREATE TABLE changes (seq INTEGER PRIMARY KEY, node INTEGER NOT NULL);
CREATE TABLE namespaces (namespace TEXT PRIMARY KEY, tenant TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE tenants (
    tenant TEXT PRIMARY KEY, entries INTEGER NOT NULL, bytes INTEGER NOT NULL, names INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE shared (one INTEGER PRIMARY KEY CHECK (one = 1), birth TEXT NOT NULL, position INTEGER NOT NULL);
INSERT INTO counters VALUES ('entry_bytes', 0), ('pinned_bytes', 0), ('clock', 0);
INSERT INTO tenants VALUES ('', 0, 0, 0);
CREATE INDEX entries_by_use ON entries (pinned, last_used);
CREATE INDEX entries_by_expiry ON entries (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX entries_by_age ON entries (added_at) WHERE NOT named;
CREATE INDEX nodes_by_key ON nodes (key);
CREATE INDEX nodes_pinned ON nodes (key) WHERE pinned;
CREATE INDEX members_by_document ON members (document, arrival);
CREATE INDEX nodes_by_source ON nodes (source) WHERE source IS NOT NULL;
CREATE TRIGGER entry_named AFTER INSERT ON nodes BEGIN
    UPDATE entries SET named = 1 WHERE key = new.key AND NOT named;
END;
CREATE TRIGGER entry_named_late AFTER UPDATE OF key ON nodes BEGIN
    UPDATE entries SET named = 1 WHERE key = new.key AND NOT named;
END;
CREATE TRIGGER piece_removed AFTER DELETE ON nodes BEGIN
    DELETE FROM members WHERE seq = old.seq;
END;
CREATE TRIGGER document_ended AFTER DELETE ON members BEGIN
    DELETE FROM documents WHERE number = old.document AND NOT EXISTS (SELECT 1 FROM members WHERE document = old.document);
END;
CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN
    UPDATE counters SET value = value + new.bytes WHERE name = 'entry_bytes';
    UPDATE counters SET value = value + new.bytes WHERE name = 'pinned_bytes' AND new.pinned;
    UPDATE tenants SET entries = entries + 1, bytes = bytes + new.bytes WHERE tenant = new.tenant;
END;
CREATE TRIGGER entry_deleted AFTER DELETE ON entries BEGIN
    UPDATE counters SET value = value - old.bytes WHERE name = 'entry_bytes';
    UPDATE counters SET value = value - old.bytes WHERE name = 'pinned_bytes' AND old.pinned;
    UPDATE tenants SET entries = entries - 1, bytes = bytes - old.bytes WHERE tenant = old.tenant;
    INSERT INTO deletions (key) VALUES (old.key);
END;
CREATE TRIGGER entry_pinned AFTER UPDATE OF pinned ON entries BEGIN
    UPDATE counters SET value = value + (new.pinned - old.pinned) * new.bytes WHERE name = 'pinned_bytes';
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
CREATE TRIGGER changes_forgotten AFTER INSERT ON changes BEGIN
    DELETE FROM changes WHERE seq <= new.seq - 10000;
END;
CREATE TRIGGER node_pinned AFTER UPDATE OF key, pinned ON nodes WHEN old.pinned OR new.pinned BEGIN
    UPDATE entries SET pinned = EXISTS (SELECT 1 FROM nodes WHERE nodes.key = entries.key AND nodes.pinned)
    WHERE key IN (old.key, new.key);
END;
CREATE TRIGGER pinned_node_removed AFTER DELETE ON nodes WHEN old.pinned BEGIN
    UPDATE entries SET pinned = EXISTS (SELECT 1 FROM nodes WHERE nodes.key = entries.key AND nodes.pinned)
    WHERE key = old.key;
END;
"""


def make_tables(connection: sqlite3.Connection) -> None:
    """Make the tables, in a transaction that has begun."""
    statement = ""
    for line in _SCHEMA.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""
    # The numbers of changes and deletions begin above all that another index in this place gave out.
    first = time.time_ns() // 1_000_000
    connection.execute("INSERT INTO changes (seq, node) VALUES (?, 0)", (first,))
    connection.execute("INSERT INTO deletions (seq, key) VALUES (?, '')", (first,))
    connection.execute(f"PRAGMA user_version = {_VERSION}")


def check_version(connection: sqlite3.Connection, path: Path | None) -> None:
    """Raise `StoreFormatError` if an index that is not empty was written by another version."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    is_empty = version == 0 and not connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    if version != _VERSION and not is_empty:
        raise StoreFormatError(
            f"index {path} is in format version {version}, but this cacheblend-rag reads version {_VERSION}; remove the store "
            "folder and warm it again (its KV is recomputed), or use the cacheblend-rag that wrote it"
        )
