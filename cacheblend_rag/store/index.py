"""The index of a store: an SQLite database of what is in its files, whose it is, and what chunks are called.

The folder of a store::

    store.json        the format and its version
    store.lock        held while a process opens the index
    index.sqlite      what the files hold, and the names (and its -wal and -shm)
    kv/ab/KEY…        one file a chunk, called by its key, in a folder named by the key's first two digits
    tmp/              files not yet in their place
    reserve           room on the disk, given up so that things can be deleted when it is full
"""

from __future__ import annotations

import errno
import json
import os
import re
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ConfigError, StoreError, StoreFormatError, StoreFullError, StoreReadOnlyError
from cacheblend_rag.files import locked, replace_text

__all__ = ["KEY", "Index", "drop_entries", "is_store", "owner_of", "storing", "valid_key"]

_FORMAT, _FORMAT_VERSION = "cacheblend-rag store", 3
_MARK = "store.json"
# What a process that was killed while making a store may have left before the mark was in place.
_MAKING = re.compile(r"store\.lock|\.store\.json\..*")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
KEY = re.compile(r"[0-9a-f]{8,128}")

# A reader waits for no writer, but for moments while a log is recovered or shortened.
_READ_TIMEOUT_S = 1.0
# The inner pages of an index of a million entries; its leaves are left to the system's page cache, which all processes share.
_READ_CACHE_BYTES = 16 * 1024**2
# How long answers wait for who writes, and how long they do not once that was in vain.
_BRIEFLY_S, _BUSY_S = 0.5, 5.0
# What SQLite raises: it quotes a damaged schema in its message, which then is not text.
_ERRORS = (sqlite3.Error, UnicodeError)
# What it says of a damaged file, or one that has lost a part of it.
_DAMAGE = ("malformed", "not a database", "no such table", "no such column", "Could not decode")

_VERSION = 11
_SCHEMA = Path(__file__).with_name("schema.sql").read_text(encoding="utf-8")


def valid_key(key: str) -> str:
    """Return `key` if it is 8 to 128 lower-case hexadecimal digits; StoreError otherwise."""
    if not KEY.fullmatch(key):
        raise StoreError(f"{key[:140]!r} is not a store key: a key is 8 to 128 lower-case hexadecimal digits")
    return key


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn the errors of writing below `path` into the store's own."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFullError(
                f"no space left on the disk of {path}; free some, or give the store a byte budget (disk_bytes)"
            ) from error
        if error.errno in _READ_ONLY:
            raise StoreReadOnlyError(
                f"store folder {path} is not writable ({error.strerror}); give a writable one"
            ) from error
        raise StoreError(f"store folder {path} cannot be written: {error}") from error


def is_store(path: Path) -> bool:
    """Return whether a folder is a store of this version; False where one can be made."""
    names: list[str] = []
    mark: object = None
    try:
        names = sorted(name for name in os.listdir(path) if not _MAKING.fullmatch(name))
        mark = json.loads((path / _MARK).read_text(encoding="utf-8"))
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        raise StoreFormatError(f"{path} is a file; a store needs a folder") from None
    except ValueError:
        mark = "damaged"
    except OSError as error:
        raise StoreError(f"store folder {path} cannot be read: {error}") from error
    if not names:
        return False
    if mark is None:
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise StoreFormatError(
            f"folder {path} is not a store and holds other files ({shown}); give an empty or a new folder"
        )
    if not isinstance(mark, dict) or mark.get("format") != _FORMAT:
        raise StoreFormatError(
            f"{path / _MARK} is damaged or was not written by cacheblend-rag; give another folder, "
            "or remove this one and warm a new store"
        )
    version = mark.get("version")
    if type(version) is not int or version != _FORMAT_VERSION:
        raise StoreFormatError(
            f"store folder {path} is in format version {version!r}, but this cacheblend-rag reads version {_FORMAT_VERSION}; "
            "remove the folder and warm it again (its KV is recomputed), or use the cacheblend-rag that wrote it"
        )
    return True


class Index:
    """One connection that reads and one that writes, so that no look-up waits for a commit; in memory without a folder.

    The file of an entry is removed, by `remove`, in the transaction that drops the entry.
    """

    def __init__(
        self,
        folder: Path | None = None,
        remove: Callable[[str], None] | None = None,
        lock_timeout_s: float = 60.0,
    ) -> None:
        self._folder, self._remove = folder, remove
        self._path = None if folder is None else folder / "index.sqlite"
        self._lock_timeout_s = lock_timeout_s
        self._busy_until = 0.0
        self._process = os.getpid()
        self._closed = False
        self._read_lock = threading.Lock()
        # In memory there is but one connection.
        self._write_lock = threading.Lock() if folder else self._read_lock
        self._connections: dict[str, sqlite3.Connection] = {}
        # Which file they have open.
        self._opened: tuple[int, int] | None = None
        self._finalizer = weakref.finalize(self, _disconnect, self._connections)
        if folder is None:
            self._connections["reader"] = self._connections["writer"] = connection = _connect(":memory:")
            self._set_up(connection)
            return
        if not is_store(folder):
            with storing(folder):
                # Made here, so that whether it may be written can be seen; its parts are made later.
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        parts = (folder, folder / "kv", folder / "tmp", folder / "index.sqlite")
        if not all(os.access(part, os.W_OK) for part in parts if part.exists()):
            raise StoreReadOnlyError(
                f"store folder {folder} is not writable; give a writable folder, or a writable copy of it"
            )

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Give the reading connection to one thread at a time; all queries see the index as it is at the first."""
        self.check_open()
        with self._read_lock, self._translating():
            connection = self._current("reader")
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
        started = time.monotonic()
        briefly_s = 0.0 if started < self._busy_until else _BRIEFLY_S
        timeout_s = self._lock_timeout_s if wait or self._path is None else briefly_s
        if not self._write_lock.acquire(timeout=timeout_s):
            self._busy_until = time.monotonic() + _BUSY_S
            raise StoreError(f"index {self._path} is locked: another thread is writing to it")
        try:
            with self._translating():
                connection = self._current("writer")
                connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                left_s = max(started + timeout_s - time.monotonic(), 0.0)
                connection.execute(f"PRAGMA busy_timeout={int(left_s * 1000)}")
                connection.execute("BEGIN IMMEDIATE")
                try:
                    yield connection
                    connection.execute("COMMIT")
                finally:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
        finally:
            self._write_lock.release()

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
        """Have SQLite go through the whole index; StoreError for what it finds."""
        found = [str(row[0]) for row in self.rows("PRAGMA integrity_check(20)") if row[0] != "ok"]
        with self._translating():
            if found:
                raise sqlite3.DatabaseError(f"database disk image is malformed: {found[0]}")

    def close(self) -> None:
        """Close both connections; in a forked child they are the parent's."""
        if self._closed or self._process != os.getpid():
            return
        with self._read_lock:
            self._closed = True
        with self._write_lock:
            self._finalizer()

    # Entries; each method is one transaction.

    def tenant_of(self, key: str) -> str | None:
        """Return whose the entry of a key is, or None where it has none."""
        found = self.rows("SELECT tenant FROM entries WHERE key = ?", key)
        return str(found[0][0]) if found else None

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether it has an entry."""
        query = "SELECT key FROM entries WHERE key IN (SELECT value FROM json_each(?))"
        held = {key for (key,) in self.rows(query, json.dumps(keys))}
        return [key in held for key in keys]

    def entries(self) -> Iterator[tuple[str, int]]:
        """Yield all keys and the bytes of their files in the order of the keys, read a limited number at a time."""
        key = ""
        while found := self.rows("SELECT key, bytes FROM entries WHERE key > ? ORDER BY key LIMIT 1000", key):
            yield from found
            key = found[-1][0]

    def tenants(self) -> list[str]:
        """Return the tenants that have entries or names; "" stands for what has no tenant."""
        return [row[0] for row in self.rows("SELECT tenant FROM tenants WHERE entries OR names ORDER BY tenant")]

    def share(self, tenant: str | None = None) -> tuple[int, int, int]:
        """Return the entries, their bytes and the names of a tenant, or of all."""
        query = "SELECT ifnull(sum(entries), 0), ifnull(sum(bytes), 0), ifnull(sum(names), 0) FROM tenants "
        [(entries, nbytes, names)] = self.rows(query + "WHERE ?1 IS NULL OR tenant = ?1", tenant)
        return int(entries), int(nbytes), int(names)

    def add(self, key: str, nbytes: int, tenant: str, limit_bytes: int, place: Callable[[], None]) -> dict[str, str]:
        """Give `key` its entry and file if a name leads to it; return what is dropped for room, and whose it was."""
        with self.write() as connection:
            if owner_of(connection, key) is None:
                return {}
            connection.execute("DELETE FROM entries WHERE key = ?", (key,))
            connection.execute("INSERT INTO entries VALUES (?, ?, ?, ?)", (key, nbytes, time.time_ns(), tenant))
            place()
            (held_bytes,) = connection.execute("SELECT sum(bytes) FROM tenants").fetchone()
            victims = _oldest(connection, held_bytes - limit_bytes)
            drop_entries(connection, victims)
            return victims

    def drop(self, keys: Iterable[str], wait: bool = True) -> None:
        with self.write(wait) as connection:
            drop_entries(connection, keys)

    def oldest(self, nbytes: int) -> dict[str, str]:
        """Return the keys of entries of that many bytes, the least recently used ones, and whose they are."""
        with self.read() as connection:
            return _oldest(connection, nbytes)

    def clear(self, tenant: str | None = None) -> list[str]:
        """Drop all entries and all names, or those of one tenant; return the keys of both."""
        with self.write() as connection:
            keys = connection.execute("SELECT key FROM entries WHERE ?1 IS NULL OR tenant = ?1", (tenant,)).fetchall()
            query = (
                "SELECT seq, key, later FROM nodes LEFT JOIN namespaces USING (namespace) "
                "WHERE ?1 IS NULL OR ifnull(namespaces.tenant, '') = ?1"
            )
            nodes = connection.execute(query, (tenant,)).fetchall()
            connection.executemany("DELETE FROM nodes WHERE seq = ?", ((seq,) for seq, *_ in nodes))
            drop_entries(connection, [key for (key,) in keys])
            # Of names that machines share, others may have recorded some of these meanwhile: all are read again.
            connection.execute("UPDATE shared SET birth = '', position = 0")
        # KV may be in RAM alone or in a remote tier, without an entry.
        return list(dict.fromkeys(key for both in (*keys, *(each[1:] for each in nodes)) for key in both if key))

    def touch(self, keys: Sequence[str]) -> None:
        """Mark entries as used in this order, the last one latest; an error if another process is writing."""
        with self.write(wait=False, durable=False) as connection:
            used = enumerate(keys, time.time_ns() - len(keys))
            connection.executemany("UPDATE entries SET last_used = ? WHERE key = ?", used)

    # Connections

    def _current(self, kind: str) -> sqlite3.Connection:
        """Return the reading or the writing connection, to the index that was opened first."""
        if self._path is not None:
            if self._opened and _identity(self._path) != self._opened:
                raise StoreError(
                    f"index {self._path} was removed or replaced while it was in use; open the store again, and add "
                    "the documents whose KV is to be there"
                )
            if kind not in self._connections:
                self._connections[kind] = self._connected()
                self._opened = _identity(self._path)
        return self._connections[kind]

    def _connected(self) -> sqlite3.Connection:
        assert self._folder is not None
        path, until = self._folder, time.monotonic() + self._lock_timeout_s
        with storing(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        otherwise = (
            f"another process has been opening the store in {path} for more than {self._lock_timeout_s:g} s; end it"
        )
        with locked(path / "store.lock", until, otherwise):
            self._make_parts(path)
            connection = _connect(str(self._path))
            try:
                # What is deleted is overwritten: token ids are text. The log is brought in early, while there is room.
                for setting in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON", "wal_autocheckpoint=200"):
                    connection.execute(f"PRAGMA {setting}")
                self._set_up(connection)
            except BaseException:
                connection.close()
                raise
        return connection

    def _make_parts(self, folder: Path) -> None:
        """Make the parts that are missing."""
        with storing(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (folder / _MARK).exists():
                replace_text(folder / _MARK, json.dumps({"format": _FORMAT, "version": _FORMAT_VERSION}), private=True)
            for name in ("kv", "tmp"):
                (folder / name).mkdir(mode=0o700, exist_ok=True)
            # SQLite gives its -wal and -shm files the mode of the database. One that is there must not be opened: closing
            # it would release the locks that this process's other connections hold on it, and a thread that closed the store
            # elsewhere would take itself for the last.
            with suppress(FileExistsError):
                os.close(os.open(folder / "index.sqlite", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def _set_up(self, connection: sqlite3.Connection) -> None:
        """Make the tables where there are none, unless another version made some, and have files go with their entries."""
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        is_new = version == 0 and not connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        if version != _VERSION and not is_new:
            raise StoreFormatError(
                f"index {self._path} is in format version {version}, but this cacheblend-rag reads version {_VERSION}; "
                "remove the store folder and warm it again (its KV is recomputed), or use the cacheblend-rag that wrote it"
            )
        connection.execute(f"PRAGMA cache_size = -{_READ_CACHE_BYTES // 1024}")
        if is_new:
            connection.execute(f"PRAGMA busy_timeout={int(self._lock_timeout_s * 1000)}")
            connection.execute("BEGIN IMMEDIATE")
            for statement in re.split(r"\n(?=CREATE|INSERT)", _SCHEMA.strip()):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_VERSION}")
            connection.execute("COMMIT")
        connection.execute(f"PRAGMA busy_timeout={int(_READ_TIMEOUT_S * 1000)}")
        # Every table is asked now, so that an index without one is not found out later.
        connection.execute("SELECT 1 FROM entries, tenants").fetchone()
        if self._remove is not None:
            connection.create_function("remove_file", 1, self._remove)
            connection.execute(
                "CREATE TEMP TRIGGER entry_dropped AFTER DELETE ON main.entries BEGIN SELECT remove_file(old.key); END"
            )

    @contextmanager
    def _translating(self) -> Iterator[None]:
        """Turn SQLite's errors into the store's own."""
        try:
            yield
        except _ERRORS as error:
            where = "in memory" if self._path is None else str(self._path)
            if isinstance(error, UnicodeEncodeError):
                raise StoreError(
                    f"{error.object[:80]!r} is not valid Unicode and cannot be stored as an id or a name"
                ) from error
            text = "malformed schema" if isinstance(error, UnicodeDecodeError) else str(error)
            if "disk is full" in text or ("disk I/O" in text and self._is_full()):
                raise StoreFullError(
                    f"no space left on the disk of {where}; free some, or give the store a byte budget (disk_bytes)"
                ) from error
            if "locked" in text:
                self._busy_until = time.monotonic() + _BUSY_S
                raise StoreError(
                    f"index {where} is locked: another process has been writing to it for too long"
                ) from error
            if "readonly" in text:
                raise StoreReadOnlyError(f"index {where} is not writable; give the store a writable folder") from error
            if any(sign in text for sign in _DAMAGE):
                text = f"damaged ({text}); remove the store folder and add the documents again: a store is a cache"
            elif "disk I/O" in text:
                text += "; see to its disk or network drive, where locks and memory maps have to work, and to the system's log"
            raise StoreError(f"index {where} is unusable: {text}") from error

    def _is_full(self) -> bool:
        if self._path is None:
            return False
        room = os.statvfs(self._path.parent)
        return room.f_bavail * room.f_frsize < 64 * 1024


def drop_entries(connection: sqlite3.Connection, keys: Iterable[str]) -> None:
    """Drop entries, and their files, in a transaction that has begun."""
    connection.executemany("DELETE FROM entries WHERE key = ?", ((key,) for key in keys))


def owner_of(connection: sqlite3.Connection, key: str) -> str | None:
    """Return the tenant whose names lead to `key`, empty for none's; None if no name does."""
    query = "SELECT ifnull(tenant, '') FROM nodes LEFT JOIN namespaces USING (namespace) WHERE key = ?1 OR later = ?1 LIMIT 1"
    found = connection.execute(query, (key,)).fetchone()
    return None if found is None else str(found[0])


def _oldest(connection: sqlite3.Connection, nbytes: int) -> dict[str, str]:
    victims = {}
    oldest = connection.execute("SELECT key, tenant, bytes FROM entries ORDER BY last_used")
    while nbytes > 0 and (victim := oldest.fetchone()) is not None:
        victims[victim[0]] = victim[1]
        nbytes -= victim[2]
    oldest.close()
    return victims


def _disconnect(connections: dict[str, sqlite3.Connection]) -> None:
    while connections:
        connections.popitem()[1].close()


def _connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_READ_TIMEOUT_S, isolation_level=None, check_same_thread=False)


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what tells the file in a place from another one."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
