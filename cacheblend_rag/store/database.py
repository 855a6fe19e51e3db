"""The SQLite database of a store: its connections and its transactions."""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

from cacheblend_rag.errors import ConfigError, StoreError, StoreFormatError, StoreFullError, StoreReadOnlyError
from cacheblend_rag.store.folder import StoreFolder, locked, storing

__all__ = ["DamagedIndexError", "Database"]

_log = getLogger(__name__)

Result = TypeVar("Result")

# A reader waits for no writer, but for moments while a log is recovered or shortened.
_READ_TIMEOUT_S = 1.0
# Fewer unused pages than this, of 4 KiB each, are left for what is written next.
_TIDY_PAGES = 256
# The inner pages of an index of a million entries; its leaves are left to the system's page cache, which all processes share.
_READ_CACHE_BYTES = 16 * 1024**2
# How long answers wait for who writes, and how long they do not once that was in vain.
_BRIEFLY_S, _BUSY_S = 0.5, 5.0
# What SQLite raises: it quotes a damaged schema in its message, which then is not text.
_ERRORS = (sqlite3.Error, UnicodeError)
# What it says of a damaged file, or one that has lost a part of it.
_DAMAGE = ("malformed", "not a database", "no such table", "no such column", "disk I/O error", "Could not decode")


class DamagedIndexError(StoreError):
    """The index is damaged."""


class Database:
    """One connection that reads and one that writes, so that no look-up waits for a commit; in memory without a folder."""

    version: ClassVar[int]
    schema: ClassVar[str]
    """Statements that each begin a line, with CREATE or INSERT."""

    def __init__(
        self, folder: StoreFolder | None = None, read_only: bool = False, lock_timeout_s: float = 60.0
    ) -> None:
        self.folder = folder
        self.read_only = read_only
        self.on_drop: Callable[[sqlite3.Connection, list[str]], None] = lambda connection, keys: None
        self._path = None if folder is None else folder.index_path
        self._lock_timeout_s = lock_timeout_s
        self._busy_until = 0.0
        self._process = os.getpid()
        self._closed = False
        self._read_lock = threading.Lock()
        # In memory there is but one connection.
        self._write_lock = threading.Lock() if folder else self._read_lock
        self._connections: dict[str, sqlite3.Connection] = {}
        # Which file they have open.
        self._opened: Any = None
        # The keys whose entries the transaction under way has deleted.
        self._dropped: list[str] = []
        self._finalizer = weakref.finalize(self, _disconnect, self._connections)
        if folder is None:
            self._connections["reader"] = self._connections["writer"] = connection = _connect(":memory:")
            self._set_up(connection)

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Give the reading connection to one thread at a time."""
        self.check_open()
        with self._read_lock:
            try:
                yield self._current("reader")
            except _ERRORS as error:
                raise self._translated(error) from error

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Read as `read` does; all queries see the database as it is at the first."""
        with self.read() as connection:
            connection.execute("BEGIN")
            try:
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def rows(self, query: str, *values: Any) -> list[Any]:
        with self.read() as connection:
            return connection.execute(query, values).fetchall()

    @contextmanager
    def write(self, wait: bool = True, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Run one write transaction, rolled back by an error; without `wait` it is soon an error if another one is under way."""
        self.check_open()
        if self.read_only and self.folder is not None:
            raise StoreReadOnlyError(f"store folder {self.folder.path} is not writable; it can only be read")
        started = time.monotonic()
        briefly_s = 0.0 if started < self._busy_until else _BRIEFLY_S
        timeout_s = self._lock_timeout_s if wait or self._path is None else briefly_s
        if not self._write_lock.acquire(timeout=timeout_s):
            self._busy_until = time.monotonic() + _BUSY_S
            raise StoreError(f"index {self._path} is locked: another thread is writing to it")
        try:
            connection = self._current("writer")
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            left_s = max(started + timeout_s - time.monotonic(), 0.0)
            connection.execute(f"PRAGMA busy_timeout={int(left_s * 1000)}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                if self._dropped:
                    self.on_drop(connection, self._dropped)
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                self._dropped.clear()
        except _ERRORS as error:
            raise self._translated(error) from error
        finally:
            self._write_lock.release()

    def transact(self, deed: Callable[[sqlite3.Connection], Result], wait: bool = True) -> Result:
        with self.write(wait) as connection:
            return deed(connection)

    def check_open(self) -> None:
        """See that it may be used: it is open, and by the process that opened it."""
        if self._closed:
            raise StoreError("the store is closed; open it again")
        if self._process != os.getpid():
            # SQLite keeps one account of file locks for a whole process, and the locks themselves are not inherited.
            raise ConfigError(
                "this store was opened before the process was forked; open it in the child, after the fork"
            )

    def check(self) -> None:
        """Have SQLite go through the whole index; `DamagedIndexError` for what it finds."""
        with self.read() as connection:
            found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(20)") if row[0] != "ok"]
            if found:
                raise sqlite3.DatabaseError(f"database disk image is malformed: {found[0]}")

    def tidy(self) -> None:
        """Give unused room back to the disk, if there is much of it, no process is in the way and the disk has room for that."""
        with self.read() as connection:
            pages = int(connection.execute("PRAGMA page_count").fetchone()[0])
            free = int(connection.execute("PRAGMA freelist_count").fetchone()[0])
        self.shorten_log(vacuum=free * 4 > pages and free > _TIDY_PAGES)

    def shorten_log(self, vacuum: bool = False) -> int:
        """Bring the log into the database, if no process is in the way and the disk has room for that; return the bytes freed."""
        if self._path is None:
            return 0
        log = self._path.with_name(self._path.name + "-wal")
        before = _size(log)
        with self._write_lock:
            try:
                connection = self._current("writer")
                connection.execute("PRAGMA busy_timeout=1000")
                if vacuum:
                    connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except _ERRORS as error:
                if not any(word in str(error) for word in ("locked", "busy", "full")):
                    raise self._translated(error) from error
        return before - _size(log)

    def close(self) -> None:
        """Close both connections; in a forked child they are the parent's."""
        if self._closed or self._process != os.getpid():
            return
        with self._read_lock:
            self._closed = True
            if self._path is None:
                self._finalizer()
        if self._path is not None:
            with self._write_lock:
                self._finalizer()

    def _current(self, kind: str) -> sqlite3.Connection:
        """Return the reading or the writing connection, to the index that was opened first."""
        if self._path is not None:
            now = _identity(self._path, self.read_only)
            # Where it can only be read, another process may have changed it.
            if self._opened and not self.read_only and now != self._opened:
                raise StoreError(
                    f"index {self._path} was removed or replaced while it was in use; open the store again, and add "
                    "the documents whose KV is to be there"
                )
            if kind not in self._connections or now != self._opened:
                self._open(kind)
        return self._connections[kind]

    def _open(self, kind: str) -> None:
        assert self.folder is not None and self._path is not None
        if kind in self._connections:
            self._connections.pop(kind).close()
        if self.read_only:
            self._opened = _identity(self._path, True)
            self._connections[kind] = self._connect_read_only(self._path)
            return
        path, until = self.folder.path, time.monotonic() + self._lock_timeout_s
        with storing(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        otherwise = (
            f"another process has been opening the store in {path} for more than {self._lock_timeout_s:g} s; end it"
        )
        with locked(path / "store.lock", until, otherwise):
            self.folder.prepare()
            connection = _connect(str(self._path))
            try:
                for setting in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
                    # What is deleted is overwritten: token ids are text.
                    connection.execute(f"PRAGMA {setting}")
                self._set_up(connection)
            except BaseException:
                connection.close()
                raise
            self._opened = _identity(self._path, False)
        self._connections[kind] = connection

    def _set_up(self, connection: sqlite3.Connection) -> None:
        """Make the tables where there are none, and have the connection tell which entries go."""
        self._check_version(connection)
        connection.execute(f"PRAGMA cache_size = -{_READ_CACHE_BYTES // 1024}")
        if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            connection.execute(f"PRAGMA busy_timeout={int(self._lock_timeout_s * 1000)}")
            connection.execute("BEGIN IMMEDIATE")
            if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in re.split(r"\n(?=CREATE|INSERT)", self.schema.strip()):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {self.version}")
            connection.execute("COMMIT")
        connection.execute(f"PRAGMA busy_timeout={int(_READ_TIMEOUT_S * 1000)}")
        # Every table is asked now, so that an index without one is not found out later.
        connection.execute("SELECT 1 FROM entries, tenants").fetchone()
        connection.create_function("note_dropped", 1, self._dropped.append)
        connection.execute(
            "CREATE TEMP TRIGGER entry_dropped AFTER DELETE ON main.entries BEGIN SELECT note_dropped(old.key); END"
        )

    def _check_version(self, connection: sqlite3.Connection) -> None:
        """Raise `StoreFormatError` if an index that is not empty was written by another version."""
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        is_empty = version == 0 and not connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        if version != self.version and not is_empty:
            raise StoreFormatError(
                f"index {self._path} is in format version {version}, but this cacheblend-rag reads version {self.version}; "
                "remove the store folder and warm it again (its KV is recomputed), or use the cacheblend-rag that wrote it"
            )

    def _connect_read_only(self, path: Path) -> sqlite3.Connection:
        def attempt(options: str) -> sqlite3.Connection:
            connection = _connect(f"file:{quote(str(path.absolute()))}?{options}", uri=True)
            try:
                connection.execute("SELECT 1 FROM tenants").fetchone()
                self._check_version(connection)
            except BaseException:
                connection.close()
                raise
            return connection

        try:
            return attempt("mode=ro")
        except sqlite3.OperationalError:
            # Reading a database in WAL mode needs its -shm file, which cannot be made here. As no process has it open, it does
            # not change either; a process that opens it later is noticed by what that does to the files.
            log = path.with_name(path.name + "-wal")
            if _size(log):
                raise StoreError(
                    f"index {path} cannot be read without merging {log.name}; open the store once with write access to the folder"
                ) from None
            return attempt("immutable=1")

    def _is_full(self) -> bool:
        if self._path is None:
            return False
        room = os.statvfs(self._path.parent)
        return room.f_bavail * room.f_frsize < 64 * 1024

    def _translated(self, error: Exception) -> Exception:
        """Return the store's error for one of SQLite's."""
        where = "in memory" if self._path is None else str(self._path)
        if isinstance(error, UnicodeEncodeError):
            return StoreError(f"{error.object[:80]!r} is not valid Unicode and cannot be stored as an id or a name")
        text = _told(error)
        if "disk is full" in text or ("disk I/O" in text and self._is_full()):
            return StoreFullError(
                f"no space left on the disk of {where}; free some, or give the store a byte budget (disk_bytes)"
            )
        if "locked" in text:
            self._busy_until = time.monotonic() + _BUSY_S
            return StoreError(f"index {where} is locked: another process has been writing to it for too long")
        if "readonly" in text:
            return StoreReadOnlyError(f"index {where} is not writable; the store can only be read")
        if any(sign in text for sign in _DAMAGE):
            return DamagedIndexError(
                f"index {where} is damaged ({text}); remove the store folder and add the documents again: a store is a cache"
            )
        return StoreError(f"index {where}: {text}")


def _disconnect(connections: dict[str, sqlite3.Connection]) -> None:
    while connections:
        connections.popitem()[1].close()


def _connect(path: str, uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_READ_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=uri)


def _identity(path: Path, read_only: bool) -> Any:
    """Return what tells the file in a place from another one; where this process may not lock it, also whether it has changed."""
    try:
        status = os.stat(path)
        if not read_only:
            return status.st_dev, status.st_ino
        return status.st_ino, status.st_size, status.st_mtime_ns, _size(path.with_name(path.name + "-wal"))
    except FileNotFoundError:
        return None


def _told(error: Exception) -> str:
    return "malformed schema" if isinstance(error, UnicodeDecodeError) else str(error)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
