"""The SQLite database behind the index: tables, connections, transactions."""

from __future__ import annotations

import os
import re
import shlex
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from cacheblend_rag.errors import StoreError, StoreFormatError, StoreFullError, StoreReadOnlyError
from cacheblend_rag.store.locks import ForkSafeLock, tell_before_fork

__all__ = ["Database"]

Result = TypeVar("Result")

# How long a look-up waits, in a hurry or not: a writer is in nobody's way but for moments.
_HURRY_S, _LOOKUP_S = 0.1, 1.0
# Fewer unused pages than this, of 4 KiB each, are left for what is written next.
_TIDY_PAGES = 256
# The inner pages of an index of a million entries; its leaves are left to the system's page cache, which all processes share.
_READ_CACHE_BYTES = 16 * 1024**2
_VERSION = 3

# entries: the chunks whose KV is on disk. removals: files that have lost their entry and are to be removed. deletions: the keys
# that lost their entry lately, for other processes' RAM.
# nodes: the names. changes: the numbers of those that changed lately; no ids, so that none outlives its name. namespaces: whose
# they are, where they are a tenant's. tenants: what each has, counted by triggers so that nobody has to count a million rows.
# documents: how those that chunks are pieces of are read. members: the pieces, by the numbers of their names.
# origins: which vector stores have the names, and what their texts were made of. owed: KV that waits for its name.
# moment: the store's time and the wall clock's when it was last written down.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, file TEXT NOT NULL, bytes INTEGER NOT NULL, digest BLOB NOT NULL, last_used INTEGER NOT NULL,
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
CREATE TABLE IF NOT EXISTS moment (one INTEGER PRIMARY KEY CHECK (one = 1), now REAL NOT NULL, wall REAL NOT NULL);
INSERT OR IGNORE INTO counters VALUES ('entry_bytes', 0), ('pinned_bytes', 0), ('clock', 0);
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


class Database:
    """One connection that reads and one that writes, so that no lookup waits for a commit; in memory where no `path` is given.

    Both are closed before a fork and opened again when next they are needed, by parent and child. Abandoning them in the child
    would not do: SQLite keeps one account of file locks for a whole process, so that the child, with this account inherited and
    the locks not, would lock too little and lose what it writes when the parent closes.
    """

    def __init__(self, path: Path | None, read_only: bool = False, lock_timeout_s: float = 60.0) -> None:
        self._path = path
        self._lock_timeout_s = lock_timeout_s
        # Threads that do not wait for those who write.
        self._hurry = threading.local()
        self.read_only = read_only
        self._read_lock = ForkSafeLock()
        # In memory there is but one connection.
        self._write_lock = ForkSafeLock() if path else self._read_lock
        self._connections: dict[str, sqlite3.Connection] = {}
        self._closed = False
        self._finalizer = weakref.finalize(self, _disconnect, self._connections)
        tell_before_fork(self)
        # One that is made is opened without writing: its disk may be full, or another process writing.
        if not read_only and not self._is_made():
            with self.write() as connection:
                _check_version(connection, path)
                for statement in _statements(_SCHEMA):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {_VERSION}")

    def _is_made(self) -> bool:
        """Return whether everything is there; StoreFormatError where it is of another version."""
        with self.read() as connection:
            _check_version(connection, self._path)
            names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        return names.issuperset(re.findall(r"IF NOT EXISTS (\w+)", _SCHEMA))

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Give the reading connection to one thread at a time."""
        with self._read_lock, _translated(self._path):
            connection = self._connection("writer" if self._path is None else "reader")
            self._set_patience(connection, _HURRY_S if self._is_hurrying else _LOOKUP_S)
            yield connection

    def in_batches(self, query: str, after: Any) -> Iterator[Any]:
        """Yield the rows of a query that begins after its first column's value `after`, reading a limited number at a time."""
        while True:
            with self.read() as connection:
                rows = connection.execute(query, (after,)).fetchall()
            yield from rows
            if not rows:
                return
            after = rows[-1][0]

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Do what `read` does; all queries see the database as it is at the first."""
        with self.read() as connection:
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    @contextmanager
    def write(self, durable: bool = True, wait: bool = True) -> Iterator[sqlite3.Connection]:
        """Run one write transaction, rolled back if it ends by an error.

        If not `durable` it survives the process, but perhaps not the machine. With `wait` False it is an error if another
        thread or process is writing.
        """
        if self.read_only:
            raise StoreReadOnlyError(
                f"store folder {self._path and self._path.parent} is not writable; it can only be read"
            )
        wait = self._path is None or (wait and not self._is_hurrying)
        patience_s = self._lock_timeout_s if wait else 0.0
        until = time.monotonic() + patience_s
        if not self._write_lock.acquire(timeout=patience_s):
            raise StoreError(f"index {self._path} is locked: another thread is writing to it")
        try:
            with _translated(self._path):
                connection = self._connection("writer")
                connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
                self._set_patience(connection, max(until - time.monotonic(), 0.0))
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                    connection.execute("COMMIT")
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
        finally:
            self._write_lock.release()

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """Have what this thread writes be an error where another process or thread is writing, and not wait for it."""
        before, self._hurry.on = self._is_hurrying, True
        try:
            yield
        finally:
            self._hurry.on = before

    @property
    def _is_hurrying(self) -> bool:
        return getattr(self._hurry, "on", False)

    def _set_patience(self, connection: sqlite3.Connection, patience_s: float) -> None:
        if self._path is not None:
            connection.execute(f"PRAGMA busy_timeout={int(patience_s * 1000)}")

    def transact(self, deed: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run a transaction, and return what it returns."""
        with self.write() as connection:
            return deed(connection)

    def tidy(self) -> None:
        """Give unused room back to the disk, if there is much of it, nobody is in the way and the disk has room for that."""
        with self.read() as connection:
            pages = int(connection.execute("PRAGMA page_count").fetchone()[0])
            free = int(connection.execute("PRAGMA freelist_count").fetchone()[0])
        self.shorten_log(vacuum=free * 4 > pages and free > _TIDY_PAGES)

    def shorten_log(self, vacuum: bool = False) -> int:
        """Bring the log into the database, if nobody is in the way and the disk has room for that; return the bytes freed."""
        if self._path is None:
            return 0
        log = self._path.with_name(self._path.name + "-wal")
        before = _size(log)
        with self._write_lock, _translated(self._path):
            connection = self._connection("writer")
            connection.execute("PRAGMA busy_timeout=1000")
            try:
                if vacuum:
                    connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.OperationalError as error:
                if not any(word in str(error) for word in ("locked", "busy", "full")):
                    raise
        return before - _size(log)

    def before_fork(self) -> None:
        """Close the connections to a file; what lives in memory is simply copied by the fork."""
        if self._path is not None:
            _disconnect(self._connections)

    def close(self) -> None:
        """Close both connections."""
        with self._read_lock:
            self._closed = True
            if self._path is None:
                self._finalizer()
        if self._path is not None:
            with self._write_lock:
                self._finalizer()

    def _connection(self, kind: str) -> sqlite3.Connection:
        if self._closed:
            raise StoreError("the store is closed; open it again")
        connection = self._connections.get(kind)
        if connection is None:
            if self.read_only and self._path is not None:
                connection = _connect_read_only(self._path)
            else:
                connection = _connect(self._path)
            self._connections[kind] = connection
            if kind == "reader":
                connection.execute(f"PRAGMA cache_size = -{_READ_CACHE_BYTES // 1024}")
        return connection


def _disconnect(connections: dict[str, sqlite3.Connection]) -> None:
    while connections:
        connections.popitem()[1].close()


def _connect(path: Path | None) -> sqlite3.Connection:
    connection = sqlite3.connect(path or ":memory:", timeout=_HURRY_S, isolation_level=None, check_same_thread=False)
    if path is not None:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            # What is deleted is overwritten: token ids are text.
            connection.execute("PRAGMA secure_delete=ON")
        except BaseException:
            connection.close()
            raise
    return connection


def _connect_read_only(path: Path) -> sqlite3.Connection:
    def attempt(options: str) -> sqlite3.Connection:
        uri = f"file:{quote(str(path.absolute()))}?{options}"
        connection = sqlite3.connect(uri, uri=True, timeout=_HURRY_S, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("SELECT 1 FROM counters").fetchone()
            _check_version(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection

    try:
        return attempt("mode=ro")
    except sqlite3.OperationalError:
        # Reading a database in WAL mode needs its -shm file, which cannot be made here. As nobody has it open, it does not change
        # either.
        return attempt("immutable=1")


def _check_version(connection: sqlite3.Connection, path: Path | None) -> None:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    is_empty = version == 0 and not connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    if version != _VERSION and not is_empty:
        raise StoreFormatError(
            f"index {path} is in format version {version}, but this cacheblend-rag reads version {_VERSION}; remove the store "
            "folder and warm it again (its KV is recomputed), or use the cacheblend-rag that wrote it"
        )


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


@contextmanager
def _translated(path: Path | None) -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise StoreError(f"{error.object[:80]!r} is not valid Unicode and cannot be stored as a name") from error
    except (sqlite3.Error, UnicodeDecodeError) as error:
        where = "in memory" if path is None else str(path)
        # SQLite quotes a damaged schema in its message, which then is not text.
        text = "malformed schema" if isinstance(error, UnicodeDecodeError) else str(error)
        if "disk is full" in text or (path is not None and "disk I/O" in text and _is_full(path)):
            raise StoreFullError(
                f"no space left on the disk of {where}; free some, or give the store a byte budget (disk_bytes)"
            ) from error
        if "locked" in text:
            raise StoreError(f"index {where} is locked: another process has been writing to it for too long") from error
        if "readonly" in text:
            raise StoreReadOnlyError(f"index {where} is not writable; the store can only be read") from error
        if "malformed" in text or "not a database" in text:
            how = (
                ""
                if path is None
                else f"; repair it with `cacheblend-rag store check --repair --store {shlex.quote(str(path.parent))}`"
            )
            raise StoreError(f"index {where} is damaged ({text}){how}") from error
        raise StoreError(f"index {where}: {text}") from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_full(path: Path) -> bool:
    room = os.statvfs(path.parent)
    return room.f_bavail * room.f_frsize < 64 * 1024
