"""The tables of the index, and how those of an older version become them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from logging import getLogger

from cacheblend_rag.errors import StoreFormatError

__all__ = ["prepare_schema", "show_as_current"]

_log = getLogger(__name__)

_VERSION = 3

# entries: the chunks whose KV is on disk. pending: files that may lie in the folder without an entry, because their writer is
# between two steps; once it is dead they are removed. deletions: the keys that lost their entry lately, for other processes' RAM.
# nodes: the names. changes: the numbers of those that changed lately; no ids, so that none outlives its name. namespaces: whose
# they are, where they are a tenant's. tenants: what each has, counted by triggers so that nobody has to count a million rows.
# documents: how those that chunks are pieces of are read. members: the pieces, by the numbers of their names.
# moment: the store's time and the wall clock's when it was last written down.
_TABLES = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, file TEXT NOT NULL, bytes INTEGER NOT NULL, digest BLOB NOT NULL, last_used INTEGER NOT NULL,
    tenant TEXT NOT NULL DEFAULT '', added_at REAL NOT NULL DEFAULT 0, expires_at REAL, pinned INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pending (file TEXT PRIMARY KEY, writer TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS deletions (seq INTEGER PRIMARY KEY, key TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS nodes (
    seq INTEGER PRIMARY KEY, namespace TEXT NOT NULL, id TEXT NOT NULL, key TEXT NOT NULL, text_hash TEXT NOT NULL,
    token_ids BLOB NOT NULL, checksum INTEGER NOT NULL, pinned INTEGER NOT NULL DEFAULT 0,
    separator BLOB NOT NULL DEFAULT x'', UNIQUE (namespace, id)
);
CREATE TABLE IF NOT EXISTS documents (
    number INTEGER PRIMARY KEY, namespace TEXT NOT NULL, name TEXT NOT NULL, tokens INTEGER, separator BLOB NOT NULL,
    UNIQUE (namespace, name)
);
CREATE TABLE IF NOT EXISTS members (
    seq INTEGER PRIMARY KEY, document INTEGER NOT NULL, arrival INTEGER NOT NULL, start INTEGER, previous TEXT,
    length INTEGER NOT NULL, body TEXT NOT NULL, ends BLOB NOT NULL, expires_at REAL, checksum INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS changes (seq INTEGER PRIMARY KEY, node INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS namespaces (namespace TEXT PRIMARY KEY, tenant TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tenants (
    tenant TEXT PRIMARY KEY, entries INTEGER NOT NULL, bytes INTEGER NOT NULL, names INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS moment (one INTEGER PRIMARY KEY CHECK (one = 1), now REAL NOT NULL, wall REAL NOT NULL);
INSERT OR IGNORE INTO counters VALUES ('entry_bytes', 0), ('pinned_bytes', 0), ('clock', 0), ('revision', 0);
INSERT OR IGNORE INTO tenants VALUES ('', 0, 0, 0);
"""

_INDEXES = """
CREATE INDEX IF NOT EXISTS entries_by_use ON entries (pinned, last_used);
CREATE INDEX IF NOT EXISTS entries_by_expiry ON entries (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS nodes_by_key ON nodes (key);
CREATE INDEX IF NOT EXISTS members_by_document ON members (document, arrival);
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
    UPDATE counters SET value = value + 1 WHERE name = 'revision';
    UPDATE tenants SET names = names + 1 WHERE tenant =
        ifnull((SELECT tenant FROM namespaces WHERE namespace = new.namespace), '');
END;
CREATE TRIGGER IF NOT EXISTS node_changed AFTER UPDATE OF key, text_hash, token_ids ON nodes BEGIN
    UPDATE counters SET value = value + 1 WHERE name = 'revision';
END;
CREATE TRIGGER IF NOT EXISTS node_removed AFTER DELETE ON nodes BEGIN
    UPDATE counters SET value = value + 1 WHERE name = 'revision';
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

_FROM_VERSION_1 = """
DROP TRIGGER IF EXISTS entry_added;
DROP TRIGGER IF EXISTS entry_deleted;
DROP TRIGGER IF EXISTS node_added;
DROP TRIGGER IF EXISTS node_changed;
DROP TRIGGER IF EXISTS node_removed;
DROP INDEX IF EXISTS entries_by_use;
ALTER TABLE entries ADD COLUMN tenant TEXT NOT NULL DEFAULT '';
ALTER TABLE entries ADD COLUMN added_at REAL NOT NULL DEFAULT 0;
ALTER TABLE entries ADD COLUMN expires_at REAL;
ALTER TABLE entries ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
ALTER TABLE nodes ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
"""

_FROM_VERSION_2 = """
ALTER TABLE nodes ADD COLUMN separator BLOB NOT NULL DEFAULT x'';
"""

_COUNT_VERSION_1 = """
UPDATE tenants SET entries = (SELECT count(*) FROM entries), bytes = (SELECT ifnull(sum(bytes), 0) FROM entries),
    names = (SELECT count(*) FROM nodes) WHERE tenant = '';
"""

# What a folder that may not be written cannot be given, its reader sees through.
_VERSION_2_AS_CURRENT = """
CREATE TEMP VIEW nodes AS SELECT *, x'' AS separator FROM main.nodes;
"""

_WITHOUT_DOCUMENTS = """
CREATE TEMP VIEW documents AS SELECT 0 AS number, '' AS namespace, '' AS name, NULL AS tokens, x'' AS separator WHERE 0;
CREATE TEMP VIEW members AS SELECT 0 AS seq, 0 AS document, 0 AS arrival, NULL AS start, NULL AS previous, 0 AS length,
    '' AS body, x'' AS ends, NULL AS expires_at, 0 AS checksum WHERE 0;
"""

_VERSION_1_AS_CURRENT = """
CREATE TEMP VIEW entries AS SELECT *, '' AS tenant, 0.0 AS added_at, NULL AS expires_at, 0 AS pinned FROM main.entries;
CREATE TEMP VIEW nodes AS SELECT *, 0 AS pinned, x'' AS separator FROM main.nodes;
CREATE TEMP VIEW namespaces AS SELECT '' AS namespace, '' AS tenant WHERE 0;
CREATE TEMP VIEW tenants AS SELECT '' AS tenant, (SELECT count(*) FROM main.entries) AS entries,
    (SELECT ifnull(sum(bytes), 0) FROM main.entries) AS bytes, (SELECT count(*) FROM main.nodes) AS names;
CREATE TEMP VIEW moment AS SELECT 0.0 AS now, 0.0 AS wall WHERE 0;
"""


def prepare_schema(connection: sqlite3.Connection) -> None:
    """Make the tables, or bring those of an older version up to date, in a transaction that has begun.

    Raises
    ------
    StoreFormatError
        If they are of a later version.
    """
    version = _version(connection)
    if version == 1:
        _run(connection, _FROM_VERSION_1)
    if version in (1, 2):
        _run(connection, _FROM_VERSION_2)
    _run(connection, _TABLES)
    if version == 1:
        _run(connection, _COUNT_VERSION_1)
    _run(connection, _INDEXES)
    if version in (1, 2) and connection.execute("SELECT 1 FROM nodes LIMIT 1").fetchone():
        _log.warning(
            "the store was written by an earlier version, in which every chunk was encoded alone: its KV is served as that; add "
            "the documents again (or warm them) to have chunks encoded in their documents"
        )
    connection.execute(f"PRAGMA user_version = {_VERSION}")


def show_as_current(connection: sqlite3.Connection) -> None:
    """Let a connection that only reads see tables of any version as those of this one.

    Raises
    ------
    StoreFormatError
        If they are of a later version.
    """
    version = _version(connection)
    if version in (1, 2):
        connection.execute("PRAGMA temp_store = MEMORY")
        _run(connection, _VERSION_1_AS_CURRENT if version == 1 else _VERSION_2_AS_CURRENT)
        _run(connection, _WITHOUT_DOCUMENTS)


def _version(connection: sqlite3.Connection) -> int:
    """Return the version of the tables; 0 if there are none."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > _VERSION:
        raise StoreFormatError(
            f"the index is in format version {version}, this cacheblend-rag reads up to {_VERSION}; use the one that wrote it"
        )
    if version == 0 and connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'entries'").fetchone():
        # Version 1 did not write its number down.
        return 1
    return version


def _run(connection: sqlite3.Connection, script: str) -> None:
    for statement in _statements(script):
        connection.execute(statement)


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
