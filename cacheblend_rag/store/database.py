"""The SQLite database behind the index: connections, transactions, schema."""

from __future__ import annotations

import os
import shlex
import sqlite3
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from cacheblend_rag.errors import StoreError, StoreFullError, StoreReadOnlyError
from cacheblend_rag.store.locks import ForkSafeLock, tell_before_fork
from cacheblend_rag.store.schema import prepare_schema, show_as_current

__all__ = ["Database"]

_BUSY_S = 60.0
# Fewer unused pages than this, of 4 KiB each, are left for what is written next.
_TIDY_PAGES = 256
# The inner pages of an index of a million entries; its leaves are left to the system's page cache, which all processes share.
_READ_CACHE_BYTES = 16 * 1024**2


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
                prepare_schema(connection)

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Give the reading connection to one thread at a time."""
        with self._read_lock, _translated(self._path):
            yield self._connections.reader()

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

        Parameters
        ----------
        durable : bool
            Whether to return only when the disk has it. Otherwise it survives the process, but perhaps not the machine.
        wait : bool
            Whether to wait while another thread or process writes; if not, that is an error.
        """
        if self.read_only:
            raise StoreReadOnlyError(
                f"store folder {self._path and self._path.parent} may not be written; it can only be read"
            )
        with self._locked_for_writing(wait), _translated(self._path):
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

    @contextmanager
    def _locked_for_writing(self, wait: bool) -> Iterator[None]:
        if not self._write_lock.acquire(blocking=wait):
            raise StoreError("another thread writes to the index")
        try:
            yield
        finally:
            self._write_lock.release()

    def tidy(self) -> None:
        """Give unused room back to the disk, if there is much of it and nobody is in the way."""
        with self.read() as connection:
            pages = int(connection.execute("PRAGMA page_count").fetchone()[0])
            free = int(connection.execute("PRAGMA freelist_count").fetchone()[0])
        with self._write_lock, _translated(self._path):
            connection = self._connections.writer()
            connection.execute("PRAGMA busy_timeout=1000")
            try:
                if free * 4 > pages and free > _TIDY_PAGES:
                    connection.execute("VACUUM")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) and "busy" not in str(error):
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
            self._reader.execute(f"PRAGMA cache_size = -{_READ_CACHE_BYTES // 1024}")
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
                show_as_current(connection)
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
            how = (
                ""
                if path is None
                else f"; mend it with `cacheblend-rag store check --repair --store {shlex.quote(str(path.parent))}`"
            )
            raise StoreError(f"index {where} is damaged ({text}){how}") from error
        raise StoreError(f"index {where}: {text}") from error


def _is_full(path: Path) -> bool:
    room = os.statvfs(path.parent)
    return room.f_bavail * room.f_frsize < 64 * 1024
