"""The SQLite database behind the index: connections, transactions, and what is done when it is damaged."""

from __future__ import annotations

import inspect
import os
import shlex
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from cacheblend_rag.errors import StoreError, StoreFullError, StoreReadOnlyError
from cacheblend_rag.store.locks import ForkSafeLock, tell_before_fork
from cacheblend_rag.store.mirror import alone_in, attach_mirror, follow, mirror_of, revisions
from cacheblend_rag.store.restore import BROKEN, Doubt, connect_source, find_rows, heal_index, is_sound_row
from cacheblend_rag.store.schema import check_version, has_tables, make_tables, restart_sequences

__all__ = ["DamagedIndexError", "Database", "healing"]

_log = getLogger(__name__)

Result = TypeVar("Result")
Owner = TypeVar("Owner")

# How long a look-up waits, in a hurry or not: a writer is in nobody's way but for moments.
_HURRY_S, _LOOKUP_S = 0.1, 1.0
# Fewer unused pages than this, of 4 KiB each, are left for what is written next.
_TIDY_PAGES = 256
# The inner pages of an index of a million entries; its leaves are left to the system's page cache, which all processes share.
_READ_CACHE_BYTES = 16 * 1024**2


# What SQLite says where a mirror cannot be had: there is no room, or it is another user's.
_NO_MIRROR = ("full", "readonly", "I/O", "unable to open")
# How long it is done without a mirror for which there was no room, before it is tried again.
_MIRROR_AGAIN_S = 60.0
_ATTEMPTS = 4
# What SQLite says of a damaged file, or one that has lost a part of it. Constraints hold, so long as nothing is damaged.
_DAMAGE = ("malformed", "not a database", "no such table", "no such column", "disk I/O error", "Could not decode")


class DamagedIndexError(StoreError):
    """The index is damaged or gone, or does not agree with its mirror: in what is in `doubt`, or in their revisions."""

    def __init__(self, message: str, doubt: Doubt | None = None) -> None:
        super().__init__(message)
        self.doubt = doubt


class _Hurry(threading.local):
    """Whether this thread does not wait for those who write, and whether it has asked the mirror in vain."""

    on = False
    believes = False


class Database:
    """One connection that reads and one that writes, so that no lookup waits for a commit; in memory where no `path` is given.

    Both are closed before a fork and opened again when next they are needed, by parent and child. Abandoning them in the child
    would not do: SQLite keeps one account of file locks for a whole process, so that the child, with this account inherited and
    the locks not, would lock too little and lose what it writes when the parent closes.

    An index that is found damaged or gone is restored by `heal`, here or in another process, under another inode: every
    transaction looks whether it is still the one that was opened. `prepare` makes what is missing of the folder first.
    """

    def __init__(
        self,
        path: Path | None,
        read_only: bool = False,
        lock_timeout_s: float = 60.0,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._prepare = prepare
        self._lock_timeout_s = lock_timeout_s
        self._hurry = _Hurry()
        self.read_only = read_only
        self._read_lock = ForkSafeLock()
        # In memory there is but one connection.
        self._write_lock = ForkSafeLock() if path else self._read_lock
        self._connections: dict[str, sqlite3.Connection] = {}
        # Which files they have open.
        self._opened: dict[str, list[tuple[int, int] | None]] = {}
        # What they were like when one that only reads opened them.
        self._seen: list[tuple[int, int] | None] = []
        self._is_mirrored = False
        self._unmirrored_at = -_MIRROR_AGAIN_S
        # What was looked into, and could not be mended.
        self._settled: set[Doubt] = set()
        self._closed = False
        self._finalizer = weakref.finalize(self, _disconnect, self._connections)
        tell_before_fork(self)
        if path is None:
            with self.write() as connection:
                make_tables(connection)
        elif not read_only:
            with alone_in(path.parent):
                for leftover in (path, mirror_of(path)):
                    leftover.with_name(leftover.name + ".new").unlink(missing_ok=True)
                mirror = mirror_of(path)
                if mirror.exists() and not os.access(mirror, os.R_OK | os.W_OK):
                    # Another user's, as after maintenance by root: who writes next makes one.
                    mirror.unlink()
            self.healing(self._look)

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Give the reading connection to one thread at a time."""
        with self._read_lock, _translated(self._path):
            connection = self._current("writer" if self._path is None else "reader")
            if self._path is not None:
                _set_patience(connection, _HURRY_S if self._hurry.on else _LOOKUP_S)
            yield connection

    def in_batches(self, query: str, after: Any) -> Iterator[Any]:
        """Yield the rows of a query that begins after its first column's value `after`, reading a limited number at a time."""

        def read() -> list[Any]:
            with self.read() as connection:
                return connection.execute(query, (after,)).fetchall()

        while True:
            rows = self.healing(read)
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
    def write(self, wait: bool = True) -> Iterator[sqlite3.Connection]:
        """Run one write transaction, rolled back if it ends by an error.

        It survives the machine. With `wait` False it is an error if another thread or process is writing.
        """
        if self.read_only:
            raise StoreReadOnlyError(
                f"store folder {self._path and self._path.parent} is not writable; it can only be read"
            )
        wait = self._path is None or (wait and not self._hurry.on)
        patience_s = self._lock_timeout_s if wait else 0.0
        until = time.monotonic() + patience_s
        if not self._write_lock.acquire(timeout=patience_s):
            raise StoreError(f"index {self._path} is locked: another thread is writing to it")
        try:
            with _translated(self._path):
                connection = self._begin(until)
                try:
                    revision = self._revision(connection)
                    yield connection
                    if revision is not None:
                        assert self._path is not None
                        follow(connection, revision, self._path)
                    connection.execute("COMMIT")
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
        finally:
            self._write_lock.release()

    @contextmanager
    def hurrying(self, on: bool = True) -> Iterator[None]:
        """Have what this thread writes be an error where another process or thread is writing; with `on` False, wait again."""
        before, self._hurry.on = self._hurry.on, on
        try:
            yield
        finally:
            self._hurry.on = before

    def transact(self, deed: Callable[[sqlite3.Connection], Result]) -> Result:
        """Run a transaction, and return what it returns."""

        def run() -> Result:
            with self.write() as connection:
                return deed(connection)

        return self.healing(run)

    def healing(self, deed: Callable[[], Result]) -> Result:
        """Return what `deed` returns; it is done again where it met a damaged index, once that has been restored."""
        for _ in range(_ATTEMPTS):
            try:
                return deed()
            except DamagedIndexError as found:
                try:
                    self.heal(found)
                except StoreError:
                    if found.doubt is None:
                        raise
                    # Others are in the way: what the index says is used for now.
                    with self._believing():
                        return deed()
            except StoreFullError as error:
                if not self._is_mirrored or not isinstance(error.__cause__, sqlite3.Error):
                    raise
                self._give_up_mirror()
        return deed()

    def heal(self, found: DamagedIndexError) -> None:
        """Restore the index, or have the mirror made anew, if something is wrong with them as `found` says."""
        if self._path is None:
            raise found
        if self.read_only:
            how = f"`cacheblend-rag store check --repair --store {shlex.quote(str(self._path.parent))}`"
            raise StoreError(f"{found}; repair it with {how}") from found
        patience_s = _HURRY_S if self._hurry.on else self._lock_timeout_s
        if not self._write_lock.acquire(timeout=patience_s):
            raise StoreError(f"index {self._path} is locked: another thread is writing to it") from found
        try:
            with _translated(self._path):
                self._disconnect("writer")
                self._prepare()
                done = heal_index(self._path, found.doubt, patience_s)
        finally:
            self._write_lock.release()
        with self._read_lock:
            self._disconnect("reader", "mirror")
            if found.doubt is not None:
                self._settled.add(found.doubt)
        if done is not None:
            _log.warning("%s: %s", found, done)

    def _give_up_mirror(self) -> None:
        """Do without the mirror for a while, to have its room on a full disk."""
        assert self._path is not None
        with self._write_lock:
            self._disconnect("writer")
            self._is_mirrored = False
            self._unmirrored_at = time.monotonic()
            mirror_of(self._path).unlink(missing_ok=True)
        with self._read_lock:
            self._disconnect("mirror")

    def _is_mirror_due(self) -> bool:
        """Return whether a mirror is there, or is to be tried where there was no room for one."""
        assert self._path is not None
        is_there = mirror_of(self._path).exists()
        return is_there or time.monotonic() - self._unmirrored_at >= _MIRROR_AGAIN_S

    @contextmanager
    def _believing(self) -> Iterator[None]:
        self._hurry.believes = True
        try:
            yield
        finally:
            self._hurry.believes = False

    def doubt(self, table: str, where: str, asked: Iterable[tuple[Any, ...]]) -> None:
        """Have the index healed if its mirror knows better, where the index says nothing, or nothing sound."""
        if self._path is None or self.read_only or self._hurry.believes:
            return
        for values in asked:
            doubt = Doubt(table, where, values)
            with self._read_lock, _translated(self._path):
                if doubt in self._settled:
                    continue
                try:
                    mirror = self._current("mirror")
                    _set_patience(mirror, _HURRY_S)
                    rows = find_rows(mirror, doubt)
                    is_known = bool(rows) and all(is_sound_row(table, row, mirror) for row in rows)
                except BROKEN:
                    # The next who writes makes it anew.
                    return
                if is_known and find_rows(self._current("reader"), doubt) != rows:
                    raise DamagedIndexError(f"index {self._path} has lost what it said of {values[-1]!r}", doubt)

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
            connection = self._current("writer")
            connection.execute("PRAGMA busy_timeout=1000")
            try:
                if vacuum:
                    connection.execute("VACUUM")
                    if self._is_mirrored:
                        connection.execute("VACUUM mirror")
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

    def _begin(self, until: float) -> sqlite3.Connection:
        """Begin to write; nobody replaces the index from here on, as that takes the mirror's lock."""
        for _ in range(_ATTEMPTS):
            if self._path and not self._is_mirrored and self._is_mirror_due():
                self._disconnect("writer")
            connection = self._current("writer")
            # Always: its mirror is of the same revision, and must not be ahead of a log whose end was lost with the machine.
            connection.execute("PRAGMA synchronous=FULL")
            _set_patience(connection, max(until - time.monotonic(), 0.0))
            connection.execute("BEGIN IMMEDIATE")
            if self._path is None or self._files("writer") == self._opened["writer"]:
                return connection
            connection.execute("ROLLBACK")
        raise StoreError(f"index {self._path} is replaced whenever it is to be written; see who else writes there")

    def _revision(self, connection: sqlite3.Connection) -> int | None:
        """Return the revision of an index that has a mirror, which must have the same."""
        if not self._is_mirrored:
            return None
        index, mirror = revisions(connection)
        if index is None or index != mirror:
            raise DamagedIndexError(f"index {self._path} is not of the same state as its mirror")
        return index

    def _current(self, kind: str, patience_s: float = _HURRY_S) -> sqlite3.Connection:
        """Return a connection to what is in its place now."""
        if self._closed:
            raise StoreError("the store is closed; open it again")
        if self._path is None:
            return self._connections.get(kind) or self._connect(kind, patience_s)
        files, seen = self._files(kind), self._states() if self.read_only else []
        connection = self._connections.get(kind)
        if connection is None or files != self._opened[kind] or seen != self._seen:
            self._disconnect(kind)
            self._seen = seen
            connection = self._connect(kind, patience_s)
            # Not what is there by now, which may be another file already; but where it was made just now.
            self._opened[kind] = [opened or now for opened, now in zip(files, self._files(kind), strict=True)]
        return connection

    def _files(self, kind: str) -> list[tuple[int, int] | None]:
        """Return which files are in the place of those that a connection opens; only the mirror may be missing."""
        assert self._path is not None
        found: list[tuple[int, int] | None] = []
        for path in (self._path, mirror_of(self._path)):
            if (kind, path == self._path) in (("reader", False), ("mirror", True)):
                continue
            try:
                status = os.stat(path)
            except FileNotFoundError:
                if path == self._path and not self.read_only:
                    raise DamagedIndexError(f"index {path} is gone") from None
                found.append(None)
            else:
                found.append((status.st_dev, status.st_ino))
        return found

    def _states(self) -> list[tuple[int, int] | None]:
        """Return sizes and times of the index and its log: where this process may not write, it may be all it can go by."""
        assert self._path is not None
        found: list[tuple[int, int] | None] = []
        for path in (self._path, self._path.with_name(self._path.name + "-wal")):
            try:
                status = os.stat(path)
            except FileNotFoundError:
                found.append(None)
            else:
                found.append((status.st_size, status.st_mtime_ns))
        return found

    def _connect(self, kind: str, patience_s: float) -> sqlite3.Connection:
        path = self._path
        if path is None:
            connection = _connect(None)
        elif kind == "mirror":
            connection = connect_source(mirror_of(path), True, patience_s)
        elif self.read_only:
            connection = _connect_read_only(path)
        else:
            connection = _connect(path)
            if kind == "writer":
                try:
                    _set_patience(connection, _HURRY_S if self._hurry.on else self._lock_timeout_s)
                    self._is_mirrored = self._is_mirror_due() and _mirror(connection, path)
                    if not self._is_mirrored:
                        self._unmirrored_at = time.monotonic()
                except BaseException:
                    connection.close()
                    raise
        if kind == "reader":
            connection.execute(f"PRAGMA cache_size = -{_READ_CACHE_BYTES // 1024}")
        self._connections[kind] = connection
        return connection

    def _disconnect(self, *kinds: str) -> None:
        for kind in kinds:
            if kind in self._connections:
                self._connections.pop(kind).close()

    def _make(self, connection: sqlite3.Connection) -> None:
        """Make the tables that are not there; where all are nothing is written, for others may be writing."""
        assert self._path is not None
        check_version(connection, self._path)
        if has_tables(connection):
            return
        _set_patience(connection, self._lock_timeout_s)
        connection.execute("BEGIN IMMEDIATE")
        is_new = not connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        make_tables(connection)
        if is_new:
            # Another one may have been here.
            restart_sequences(connection)
            has_files = any((self._path.parent / "kv").glob("*/*"))
            connection.execute("UPDATE counters SET value = ? WHERE name = 'adopting'", (has_files,))
        connection.execute("COMMIT")

    def _look(self) -> None:
        """See at opening whether everything is there, and the index not behind its mirror."""
        with self.read() as connection:
            self._make(connection)
            revision = connection.execute("SELECT value FROM counters WHERE name = 'revision'").fetchone()
            if self._files("mirror") == [None]:
                return
            mirror = self._current("mirror", self._lock_timeout_s)
            differs = mirror.execute("SELECT value FROM mirrored_revision").fetchone() != revision
        if differs:
            # Most likely others have written in between; healing looks while nobody does.
            self.heal(DamagedIndexError(f"index {self._path} is not of the same state as its mirror"))


def _set_patience(connection: sqlite3.Connection, patience_s: float) -> None:
    connection.execute(f"PRAGMA busy_timeout={int(patience_s * 1000)}")


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


def _mirror(connection: sqlite3.Connection, path: Path) -> bool:
    """Have a connection write the mirror too; return False if there is no room for one."""
    try:
        with alone_in(path.parent):
            attach_mirror(connection, path)
    except (OSError, sqlite3.OperationalError) as error:
        if isinstance(error, sqlite3.Error) and not any(sign in str(error) for sign in _NO_MIRROR):
            raise
        _log.debug("index %s has no mirror: %s", path, error)
        mirror_of(path).unlink(missing_ok=True)
        return False
    return True


def _connect_read_only(path: Path) -> sqlite3.Connection:
    def attempt(options: str) -> sqlite3.Connection:
        uri = f"file:{quote(str(path.absolute()))}?{options}"
        connection = sqlite3.connect(uri, uri=True, timeout=_HURRY_S, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("SELECT 1 FROM counters").fetchone()
            check_version(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection

    try:
        return attempt("mode=ro")
    except sqlite3.OperationalError:
        # Reading a database in WAL mode needs its -shm file, which cannot be made here. As nobody has it open, it does not change
        # either; who opens it later is noticed by what that does to the files.
        log = path.with_name(path.name + "-wal")
        if _size(log):
            raise StoreError(
                f"index {path} cannot be read without what stands in {log.name}; open the store once where the folder may be "
                "written, which brings that into it"
            ) from None
        return attempt("immutable=1")


@contextmanager
def _translated(path: Path | None) -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise StoreError(f"{error.object[:80]!r} is not valid Unicode and cannot be stored as a name") from error
    except BROKEN as error:
        where = "in memory" if path is None else str(path)
        text = "malformed schema" if isinstance(error, UnicodeDecodeError) else str(error)
        if "disk is full" in text or (path is not None and "disk I/O" in text and _is_full(path)):
            raise StoreFullError(
                f"no space left on the disk of {where}; free some, or give the store a byte budget (disk_bytes)"
            ) from error
        if "locked" in text:
            raise StoreError(f"index {where} is locked: another process has been writing to it for too long") from error
        if "readonly" in text:
            raise StoreReadOnlyError(f"index {where} is not writable; the store can only be read") from error
        if isinstance(error, sqlite3.IntegrityError | UnicodeDecodeError) or any(sign in text for sign in _DAMAGE):
            raise DamagedIndexError(f"index {where} is damaged ({text})") from error
        raise StoreError(f"index {where}: {text}") from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_full(path: Path) -> bool:
    room = os.statvfs(path.parent)
    return room.f_bavail * room.f_frsize < 64 * 1024


def healing(database: str) -> Callable[[type[Owner]], type[Owner]]:
    """Have the public methods of a class, each one transaction, done again where they met a damaged index, which is restored.

    `database` is the attribute that has the database.
    """

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self, database).healing(lambda: method(self, *args, **kwargs))

        return run

    def decorate(owner: type[Owner]) -> type[Owner]:
        for name, method in list(vars(owner).items()):
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(owner, name, wrap(method))
        return owner

    return decorate
