"""The SQLite database behind the index: connections, transactions, schema."""

from __future__ import annotations

import os
import sqlite3
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from cacheblend_rag.errors import StoreError, StoreFullError, StoreReadOnlyError
from cacheblend_rag.store.locks import ForkSafeLock, tell_before_fork

__all__ = ["Database"]

_BUSY_S = 60.0

# entries: the chunks whose KV is on disk. pending: files that may lie in the folder without an entry, because their writer is
# between two steps; once it is dead they are removed. deletions: the keys that lost their entry lately, for other processes' RAM.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY, file TEXT NOT NULL, bytes INTEGER NOT NULL, digest BLOB NOT NULL, last_used INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_by_use ON entries (last_used);
CREATE TABLE IF NOT EXISTS pending (file TEXT PRIMARY KEY, writer TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS deletions (seq INTEGER PRIMARY KEY, key TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT OR IGNORE INTO counters VALUES ('entry_bytes', 0), ('clock', 0), ('revision', 0);
CREATE TRIGGER IF NOT EXISTS entry_added AFTER INSERT ON entries BEGIN
    UPDATE counters SET value = value + new.bytes WHERE name = 'entry_bytes';
END;
CREATE TRIGGER IF NOT EXISTS entry_deleted AFTER DELETE ON entries BEGIN
    UPDATE counters SET value = value - old.bytes WHERE name = 'entry_bytes';
    INSERT INTO deletions (key) VALUES (old.key);
END;
CREATE TABLE IF NOT EXISTS nodes (
    seq INTEGER PRIMARY KEY, namespace TEXT NOT NULL, id TEXT NOT NULL, key TEXT NOT NULL, text_hash TEXT NOT NULL,
    token_ids BLOB NOT NULL, checksum INTEGER NOT NULL, UNIQUE (namespace, id)
);
CREATE INDEX IF NOT EXISTS nodes_by_key ON nodes (key);
CREATE TRIGGER IF NOT EXISTS node_added AFTER INSERT ON nodes BEGIN
    UPDATE counters SET value = value + 1 WHERE name = 'revision';
END;
CREATE TRIGGER IF NOT EXISTS node_changed AFTER UPDATE ON nodes BEGIN
    UPDATE counters SET value = value + 1 WHERE name = 'revision';
END;
CREATE TRIGGER IF NOT EXISTS node_removed AFTER DELETE ON nodes BEGIN
    UPDATE counters SET value = value + 1 WHERE name = 'revision';
END;
"""


class Database:
    """One connection that reads and one that writes, so that no lookup waits for a commit.

    Both are closed before a fork and opened again when next they are needed, by parent and child. Abandoning them in the child
    would not do: SQLite keeps one account of file locks for a whole process, so that the child, with this account inherited and
    the locks not, would lock too little and lose what it writes when the parent closes.

    Parameters
    ----------
    path : Path, optional
        The database file, which exists; by default the database lives in memory.
    read_only : bool
        Whether the file and its folder may not be written.
    """

    def __init__(self, path: Path | None, read_only: bool = False) -> None:
        self._path = path
        self.read_only = read_only
        self._read_lock = ForkSafeLock()
        # In memory there is but one connection.
        self._write_lock = ForkSafeLock() if path else self._read_lock
        self._connections = _Connections(path, read_only)
        self._finalizer = weakref.finalize(self, self._connections.close)
        tell_before_fork(self)
        if not read_only:
            with self.write() as connection:
                for statement in _statements(_SCHEMA):
                    connection.execute(statement)

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Give the reading connection to one thread at a time."""
        with self._read_lock, _translated(self._path):
            yield self._connections.reader()

    @contextmanager
    def write(self, durable: bool = True, wait: bool = True) -> Iterator[sqlite3.Connection]:
        """Run one write transaction, rolled back if it ends by an error.

        Parameters
        ----------
        durable : bool
            Whether to return only when the disk has it. Otherwise it survives the process, but perhaps not the machine.
        wait : bool
            Whether to wait while another process writes; if not, that is an error.
        """
        if self.read_only:
            raise StoreReadOnlyError(
                f"store folder {self._path and self._path.parent} may not be written; it can only be read"
            )
        with self._write_lock, _translated(self._path):
            connection = self._connections.writer()
            connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            connection.execute(f"PRAGMA busy_timeout={int(_BUSY_S * 1000) if wait else 0}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def before_fork(self) -> None:
        """Close the connections to a file; what lives in memory is simply copied by the fork."""
        if self._path is not None:
            self._connections.disconnect()

    def close(self) -> None:
        """Close both connections."""
        with self._read_lock:
            self._connections.closed = True
            if self._path is None:
                self._finalizer()
        if self._path is not None:
            with self._write_lock:
                self._finalizer()


class _Connections:
    """The connections, apart from `Database` so that a finalizer can close them."""

    def __init__(self, path: Path | None, read_only: bool) -> None:
        self.path = path
        self._read_only = read_only
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self.closed = False

    def reader(self) -> sqlite3.Connection:
        self._check_open()
        if self.path is None:
            return self.writer()
        if self._reader is None:
            self._reader = self._connect_read_only(self.path) if self._read_only else self._connect(self.path)
        return self._reader

    def writer(self) -> sqlite3.Connection:
        self._check_open()
        if self._writer is None:
            self._writer = self._connect(self.path)
        return self._writer

    def close(self) -> None:
        self.closed = True
        self.disconnect()

    def disconnect(self) -> None:
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()
        self._reader = self._writer = None

    def _check_open(self) -> None:
        if self.closed:
            raise StoreError("the store is closed; open it again")

    def _connect(self, path: Path | None) -> sqlite3.Connection:
        connection = sqlite3.connect(path or ":memory:", timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        if path is not None:
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                # What is deleted is overwritten: token ids are text.
                connection.execute("PRAGMA secure_delete=ON")
            except BaseException:
                connection.close()
                raise
        return connection

    def _connect_read_only(self, path: Path) -> sqlite3.Connection:
        def attempt(options: str) -> sqlite3.Connection:
            uri = f"file:{quote(str(path.absolute()))}?{options}"
            connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                connection.execute("SELECT 1 FROM counters").fetchone()
            except BaseException:
                connection.close()
                raise
            return connection

        try:
            return attempt("mode=ro")
        except sqlite3.OperationalError:
            # Reading a database in WAL mode needs its -shm file, which cannot be made here. As nobody has it open, it does not
            # change either.
            return attempt("immutable=1")


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
        # SQLite quotes a damaged schema in its message, which then is no text.
        text = "malformed schema" if isinstance(error, UnicodeDecodeError) else str(error)
        if "disk is full" in text or (path is not None and "disk I/O" in text and _is_full(path)):
            raise StoreFullError(
                f"no room left on the disk of {where}; free some, or give the store a byte budget (disk_bytes)"
            ) from error
        if "readonly" in text:
            raise StoreReadOnlyError(f"index {where} may not be written; the store can only be read") from error
        if "malformed" in text or "not a database" in text:
            raise StoreError(
                f"index {where} is damaged ({text}); mend it with `cacheblend-rag store check --repair`"
            ) from error
        raise StoreError(f"index {where}: {text}") from error


def _is_full(path: Path) -> bool:
    room = os.statvfs(path.parent)
    return room.f_bavail * room.f_frsize < 64 * 1024
