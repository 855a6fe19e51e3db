"""The store's folder: its format mark, where things lie in it, and who is writing.

::

    store.json        the format and its version
    store.lock        held while a process opens the store
    index.sqlite      what the files hold, and the names (and its -wal and -shm)
    kv/ab/…           one file a chunk, in a folder named by the first two digits of its key
    tmp/              files not yet complete, and one lock file for each living writer
    profiles/         how fast models are on this machine and this disk (`cacheblend_rag.controller`)
    reserve           room on the disk, given up so that things can be deleted when it is full
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cacheblend_rag.errors import StoreError, StoreFormatError, StoreReadOnlyError
from cacheblend_rag.store.writers import Writers, storing

__all__ = ["StoreFolder", "valid_key"]

_FORMAT = "cacheblend-rag store"
_VERSION = 2
# Those that are brought up to date when a process that may write opens them.
_READABLE = (1, 2)
_MARK = "store.json"
# What a process that was killed while making a store may have left before the mark was in place.
_MAKING = {"store.lock", "store.json.tmp"}
_RESERVE_BYTES = 128 * 1024
_KEY = re.compile(r"[0-9a-f]{8,128}")
_FILE = re.compile(r"[0-9a-f]{8,128}\.[0-9a-f]{16}\.safetensors")


def valid_key(key: str) -> str:
    """Return `key` if it is one.

    Raises
    ------
    StoreError
        If it is not 8 to 128 lower-case hexadecimal digits.
    """
    if not _KEY.fullmatch(key):
        raise StoreError(f"{key[:140]!r} is no store key; a key is 8 to 128 lower-case hexadecimal digits")
    return key


class StoreFolder:
    """A folder on disk that holds a store, made if there is none.

    Parameters
    ----------
    path : Path
        The folder.

    Raises
    ------
    StoreFormatError
        If it was written in a format that this version does not read. Nothing is changed in it.
    StoreReadOnlyError
        If it holds no store and may not be written.
    StoreError
        If it is something else than a store.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index_path = path / "index.sqlite"
        marked = self._mark_version() is not None
        if not marked:
            with storing(path):
                # Made here, so that whether it may be written can be seen; its parts are made in `opening`.
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
        parts = (path, path / "kv", path / "tmp", self.index_path)
        self.is_made = marked
        self.read_only = not all(os.access(part, os.W_OK) for part in parts if part.exists())
        self.writers = Writers(path / "tmp", self.read_only)
        if self.read_only and not marked:
            raise StoreReadOnlyError(f"folder {path} holds no store and may not be written; choose a folder that may")

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Make the folder's parts, alone among all processes; what runs inside is alone too."""
        with storing(self.path):
            fd = os.open(self.path / "store.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with storing(self.path):
                if self._mark_version() != _VERSION:
                    # The mark is the first thing to change: from now on an older cacheblend-rag refuses the folder. The index
                    # knows its own version, and is brought up to date next, by whoever opens the folder.
                    mark = self.path / "store.json.tmp"
                    with open(mark, "w", encoding="ascii", opener=_private) as file:
                        json.dump({"format": _FORMAT, "version": _VERSION}, file)
                        file.flush()
                        os.fsync(file.fileno())
                    mark.rename(self.path / _MARK)
                for name in ("kv", "tmp"):
                    (self.path / name).mkdir(mode=0o700, exist_ok=True)
                _sync_folder(self.path)
                # SQLite gives its -wal and -shm files the mode of the database. One that is there must not be opened: closing
                # it would release the locks that this process's other connections hold on it, and whoever closed the store
                # elsewhere would take itself for the last.
                if not self.index_path.exists():
                    os.close(os.open(self.index_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self.keep_reserve()
            yield
        finally:
            os.close(fd)

    def keep_reserve(self) -> None:
        """Set room aside for deleting, if there is any."""
        reserve = self.path / "reserve"
        if reserve.exists():
            return
        try:
            with open(reserve, "wb", opener=_private) as file:
                file.write(bytes(_RESERVE_BYTES))
        except OSError:
            reserve.unlink(missing_ok=True)

    def give_up_reserve(self) -> bool:
        """Free the room set aside; return whether there was any."""
        try:
            (self.path / "reserve").unlink()
        except OSError:
            return False
        return True

    def new_file_name(self, key: str) -> str:
        """Return a file name for `key` that was never used: a file is written once and never changed."""
        return f"{valid_key(key)}.{secrets.token_hex(8)}.safetensors"

    def file_path(self, name: str) -> Path:
        """Return where the file `name` lies.

        Raises
        ------
        StoreError
            If it is no file name of this store.
        """
        if not _FILE.fullmatch(name):
            raise StoreError(
                f"{name[:200]!r} is no file name of a store: the index of {self.path} is damaged; "
                f"mend it with `cacheblend-rag store check --repair --store {shlex.quote(str(self.path))}`"
            )
        return self.path / "kv" / name[:2] / name

    def files(self) -> Iterator[Path]:
        """Yield everything that lies where the chunks' files lie."""
        for shard in sorted((self.path / "kv").iterdir()):
            if shard.is_dir():
                yield from sorted(shard.iterdir())
            else:
                yield shard

    @staticmethod
    def is_file_name(name: str) -> bool:
        """Return whether `name` is one that this store gives to files."""
        return _FILE.fullmatch(name) is not None

    def renew_index(self) -> None:
        """Put an empty database in the place of a damaged one."""
        with storing(self.path):
            for ending in ("", "-wal", "-shm"):
                self.index_path.with_name(self.index_path.name + ending).unlink(missing_ok=True)
            os.close(os.open(self.index_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def write(self, name: str, buffers: list[memoryview]) -> None:
        """Write the file `name` so that it is there completely, and durably, or not at all."""
        final = self.file_path(name)
        with storing(self.path):
            temporary = self.writers.new_part()
            try:
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    _write_all(fd, buffers)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                if not final.parent.is_dir():
                    final.parent.mkdir(mode=0o700, exist_ok=True)
                    _sync_folder(final.parent.parent)
                temporary.rename(final)
                _sync_folder(final.parent)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise

    def unlink(self, name: str) -> None:
        """Remove the file `name`, if it is there."""
        with storing(self.path):
            self.file_path(name).unlink(missing_ok=True)

    def _mark_version(self) -> int | None:
        """Return the format version of the store, which this version reads, or None where one can be made."""
        try:
            mark = json.loads((self.path / _MARK).read_text(encoding="utf-8"))
        except FileNotFoundError:
            try:
                foreign = sorted(set(os.listdir(self.path)) - _MAKING)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise StoreError(f"folder {self.path} cannot be read: {error}") from error
            if foreign:
                shown = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
                raise StoreError(
                    f"folder {self.path} is no store and holds other files ({shown}); give an empty or a new folder"
                ) from None
            return None
        except NotADirectoryError:
            raise StoreError(f"{self.path} is a file; a store needs a folder") from None
        except (ValueError, UnicodeDecodeError):
            mark = None
        except OSError as error:
            raise StoreError(f"store folder {self.path} cannot be read: {error}") from error
        if not isinstance(mark, dict) or mark.get("format") != _FORMAT:
            raise StoreFormatError(
                f"{self.path / _MARK} is damaged or not ours; give another folder, or remove this one and warm a new store"
            )
        version = mark.get("version")
        if type(version) is not int or version not in _READABLE:
            raise StoreFormatError(
                f"store folder {self.path} is in format version {version!r}, this cacheblend-rag reads versions "
                f"{' and '.join(map(str, _READABLE))}; use the one that wrote it, or warm a new store in another folder"
            )
        return version


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _write_all(fd: int, buffers: list[memoryview]) -> None:
    # The system takes at most IOV_MAX (1024 on Linux) buffers at once, and may write less than it was given.
    waiting = [buffer for buffer in buffers if buffer.nbytes]
    begin = 0
    while begin < len(waiting):
        written = os.writev(fd, waiting[begin : begin + 512])
        while begin < len(waiting) and written >= waiting[begin].nbytes:
            written -= waiting[begin].nbytes
            begin += 1
        if written:
            waiting[begin] = waiting[begin][written:]


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
