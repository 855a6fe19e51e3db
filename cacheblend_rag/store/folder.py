"""The store's folder: its format mark, its layout, and how files are put into it.

::

    store.json        the format and its version
    store.lock        held while a process opens the store
    filling.lock      held by those who add to it, and by who looks for what killed ones of them left
    index.sqlite      what the files hold, and the names (and its -wal and -shm)
    mirror.sqlite     the same again, from which a damaged index is restored (and its -journal)
    revision          the revision of both, by which a mirror is known to be behind where the index is lost
    kv/ab/…           one file a chunk, in a folder named by the first two digits of its key
    tmp/              files not yet in their place, each locked by its writer
    profiles/         how fast models are on this machine and this disk (`cacheblend_attachments.auto`)
    reserve           room on the disk, given up so that things can be deleted when it is full
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from cacheblend_rag.errors import StoreError, StoreFormatError, StoreFullError, StoreReadOnlyError
from cacheblend_rag.store.locks import Turns, let_go

__all__ = [
    "RESERVE_BYTES",
    "Part",
    "StoreFolder",
    "existing_folder",
    "is_out_of_room",
    "storing",
    "sync_folder",
    "valid_key",
]

Result = TypeVar("Result")

_FORMAT = "cacheblend-rag store"
_VERSION = 2
_MARK = "store.json"
# What a process that was killed while making a store may have left before the mark was in place.
_MAKING = {"store.lock", "store.json.tmp"}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
RESERVE_BYTES = 128 * 1024
_KEY = re.compile(r"[0-9a-f]{8,128}")
_FILE = re.compile(r"[0-9a-f]{8,128}\.[0-9a-f]{16}\.safetensors")


def valid_key(key: str) -> str:
    """Return `key` if it is 8 to 128 lower-case hexadecimal digits; StoreError otherwise."""
    if not _KEY.fullmatch(key):
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
                f"store folder {path} is not writable ({error.strerror}); it can only be read"
            ) from error
        raise StoreError(f"store folder {path} cannot be written: {error}") from error


def is_out_of_room(error: StoreFullError) -> bool:
    """Return whether the disk is full, and not a byte budget, nor a file as large as it may be."""
    return error.__cause__ is not None and getattr(error.__cause__, "errno", None) != errno.EFBIG


class StoreFolder:
    """A folder on disk that holds a store, made if there is none; nothing is changed in one of another format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index_path = path / "index.sqlite"
        self.turns = Turns(path / "filling.lock")
        self.is_made = self._is_marked() or self._has_parts()
        if not self.is_made:
            with storing(path):
                # Made here, so that whether it may be written can be seen; its parts are made in `opening`.
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
        parts = (path, path / "kv", path / "tmp", self.index_path)
        self.read_only = not all(os.access(part, os.W_OK) for part in parts if part.exists())
        if self.read_only and not self.is_made:
            raise StoreReadOnlyError(f"folder {path} is neither a store nor writable; choose a writable folder")

    @contextmanager
    def opening(self, lock_timeout_s: float = 60.0) -> Iterator[None]:
        """Make the folder's parts, alone among all processes, if they let it; what runs inside is alone too."""
        with storing(self.path):
            fd = os.open(self.path / "store.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._wait_for(fd, lock_timeout_s)
            self.prepare()
            self.keep_reserve()
            yield
        finally:
            let_go(fd)

    def _wait_for(self, fd: int, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise StoreError(
                        f"another process has been opening the store in {self.path} for more than {timeout_s:g} s; end it"
                    ) from None
                time.sleep(0.005)

    def prepare(self) -> None:
        """Make the parts that are missing."""
        with storing(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_marked():
                mark = self.path / "store.json.tmp"
                with open(mark, "w", encoding="ascii", opener=_private) as file:
                    json.dump({"format": _FORMAT, "version": _VERSION}, file)
                    file.flush()
                    os.fsync(file.fileno())
                mark.rename(self.path / _MARK)
            for name in ("kv", "tmp"):
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
            sync_folder(self.path)
            # SQLite gives its -wal and -shm files the mode of the database. One that is there must not be opened: closing
            # it would release the locks that this process's other connections hold on it, and whoever closed the store
            # elsewhere would take itself for the last.
            with suppress(FileExistsError):
                os.close(os.open(self.index_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def keep_reserve(self) -> None:
        """Set room aside for deleting, if there is any."""
        reserve = self.path / "reserve"
        if reserve.exists():
            return
        try:
            with open(reserve, "wb", opener=_private) as file:
                file.write(bytes(RESERVE_BYTES))
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
        """Return where the file `name` lies; StoreError if it is not a file name of this store."""
        if not _FILE.fullmatch(name):
            raise StoreError(
                f"{name[:200]!r} is not a file name of a store: the index of {self.path} is damaged; "
                f"repair it with `cacheblend-rag store check --repair --store {shlex.quote(str(self.path))}`"
            )
        return self.path / "kv" / name[:2] / name

    def files(self) -> Iterator[Path]:
        """Yield everything that lies where the chunks' files lie."""
        for shard in sorted((self.path / "kv").glob("*")):
            if shard.is_dir():
                yield from sorted(shard.iterdir())
            else:
                yield shard

    @staticmethod
    def is_file_name(name: str) -> bool:
        """Return whether `name` is one that this store gives to files."""
        return _FILE.fullmatch(name) is not None

    def write(self, name: str, buffers: Iterable[memoryview]) -> Part:
        """Write and sync the bytes of the file `name`, which comes to its place by `settle`."""
        with storing(self.path):
            try:
                part = Part(self._part_path(name))
            except FileNotFoundError:
                # Somebody has deleted the folder, or this part of it.
                self.prepare()
                part = Part(self._part_path(name))
            try:
                part.write(buffers)
            except BaseException:
                part.remove()
                raise
        return part

    def settle(self, name: str) -> bool:
        """Bring a written file to its place, durably; return False if it was removed meanwhile."""
        final = self.file_path(name)
        with storing(self.path):
            if not final.parent.is_dir():
                final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                sync_folder(final.parent.parent)
            try:
                self._part_path(name).rename(final)
            except FileNotFoundError:
                return False
            sync_folder(final.parent)
        return True

    def open(self, name: str, open_path: Callable[[Path], Result]) -> Result:
        """Return what `open_path` makes of the file `name`, in its place or not yet; FileNotFoundError if there is none."""
        final = self.file_path(name)
        for path in (final, self._part_path(name)):
            with suppress(FileNotFoundError):
                return open_path(path)
        # It may have come to its place in between.
        return open_path(final)

    def leftovers(self) -> list[Path]:
        """Return the files not in their place whose writer is dead."""
        return [path for path in sorted((self.path / "tmp").glob("*")) if not _is_locked(path)]

    def unlink(self, name: str) -> None:
        """Remove the file `name`, if it is there."""
        final = self.file_path(name)
        with storing(self.path):
            # In this order: its writer may bring it to its place in between.
            self._part_path(name).unlink(missing_ok=True)
            final.unlink(missing_ok=True)

    def _part_path(self, name: str) -> Path:
        return self.path / "tmp" / f"{name}.part"

    def _is_marked(self) -> bool:
        """Return whether the folder is a store of this version; False where one can be made."""
        try:
            mark = json.loads((self.path / _MARK).read_text(encoding="utf-8"))
        except FileNotFoundError:
            # Another process may have made the store since.
            return self._has_mark() and self._is_marked()
        except NotADirectoryError:
            raise StoreFormatError(f"{self.path} is a file; a store needs a folder") from None
        except ValueError:
            if self._has_parts():
                return False
            mark = None
        except OSError as error:
            raise StoreError(f"store folder {self.path} cannot be read: {error}") from error
        if not isinstance(mark, dict) or mark.get("format") != _FORMAT:
            raise StoreFormatError(
                f"{self.path / _MARK} is damaged or was not written by cacheblend-rag; give another folder, "
                "or remove this one and warm a new store"
            )
        version = mark.get("version")
        if type(version) is not int or version != _VERSION:
            raise StoreFormatError(
                f"store folder {self.path} is in format version {version!r}, but this cacheblend-rag reads version {_VERSION}; "
                "remove the folder and warm it again (its KV is recomputed), or use the cacheblend-rag that wrote it"
            )
        return True

    def _has_parts(self) -> bool:
        """Return whether there is so much of a store here that only its mark is damaged or lost."""
        parts = ("kv", "filling.lock", "reserve", "index.sqlite", "mirror.sqlite", "mirror.sqlite-journal", "revision")
        return sum((self.path / part).exists() for part in parts) > 1

    def _has_mark(self) -> bool:
        """Return whether there is a mark; StoreError if there are only other files."""
        try:
            foreign = sorted(set(os.listdir(self.path)) - _MAKING)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"folder {self.path} cannot be read: {error}") from error
        if foreign and _MARK not in foreign and not self._has_parts():
            shown = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
            raise StoreFormatError(
                f"folder {self.path} is not a store and holds other files ({shown}); give an empty or a new folder"
            )
        return _MARK in foreign


def existing_folder(location: str | Path) -> StoreFolder:
    """Return the folder of a store that is there; StoreError if it is not a store."""
    path = Path(location).expanduser()
    if not path.exists():
        raise StoreError(f"there is no folder {path}; give the folder of a store")
    folder = StoreFolder(path)
    if not folder.is_made:
        raise StoreError(f"folder {path} is empty; give the folder of a store")
    return folder


class Part:
    """A new file that its writer holds locked, so that nobody takes it for what a dead process left.

    The system lets go of the lock when the process ends, however it ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            # Between the two calls another process may have taken it for a leftover and removed it.
            if os.fstat(self._fd).st_nlink:
                break
            os.close(self._fd)

    def write(self, buffers: Iterable[memoryview]) -> None:
        """Write and sync all bytes."""
        with open(self._fd, "wb", closefd=False) as file:
            file.writelines(buffers)
            file.flush()
            os.fsync(self._fd)

    def close(self) -> None:
        """Let go of the file."""
        let_go(self._fd)

    def remove(self) -> None:
        """Remove the file, if it is not in its place."""
        self.path.unlink(missing_ok=True)
        self.close()


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        # It has come to its place since, or is another user's.
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def sync_folder(path: Path) -> None:
    """Have the names in a folder survive the machine."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
