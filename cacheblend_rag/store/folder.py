"""The store's folder: its format mark, its layout, and how files are put into it.

::

    store.json        the format and its version
    store.lock        held while a process opens the index
    index.sqlite      what the files hold, and the names (and its -wal and -shm)
    kv/ab/KEY…        one file a chunk, called by its key, in a folder named by the key's first two digits
    tmp/              files not yet in their place
    reserve           room on the disk, given up so that things can be deleted when it is full
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cacheblend_rag.errors import StoreError, StoreFormatError, StoreFullError, StoreReadOnlyError
from cacheblend_rag.files import replace_text

__all__ = ["RESERVE_BYTES", "StoreFolder", "locked", "owner_only", "storing", "valid_key"]

_FORMAT = "cacheblend-rag store"
_VERSION = 3
_MARK = "store.json"
# What a process that was killed while making a store may have left before the mark was in place.
_MAKING = re.compile(r"store\.lock|\.store\.json\..*")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_KEY = re.compile(r"[0-9a-f]{8,128}")
_SUFFIX = ".safetensors"
# No file takes longer to be written.
_LEFT_S = 3600.0
RESERVE_BYTES = 128 * 1024
_POLL_S = 0.002


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
                f"store folder {path} is not writable ({error.strerror}); give a writable one"
            ) from error
        raise StoreError(f"store folder {path} cannot be written: {error}") from error


class StoreFolder:
    """A folder on disk that holds a store, made if there is none; nothing is changed in one of another format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index_path = path / "index.sqlite"
        self.is_made = self._is_store()
        if not self.is_made:
            with storing(path):
                # Made here, so that whether it may be written can be seen; its parts are made in `prepare`.
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
        parts = (path, path / "kv", path / "tmp", self.index_path)
        if not all(os.access(part, os.W_OK) for part in parts if part.exists()):
            raise StoreReadOnlyError(
                f"store folder {path} is not writable; give a writable folder, or a writable copy of it"
            )

    def prepare(self) -> None:
        """Make the parts that are missing."""
        with storing(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (self.path / _MARK).exists():
                replace_text(self.path / _MARK, json.dumps({"format": _FORMAT, "version": _VERSION}), private=True)
            for name in ("kv", "tmp"):
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
            # SQLite gives its -wal and -shm files the mode of the database. One that is there must not be opened: closing
            # it would release the locks that this process's other connections hold on it, and a thread that closed the store
            # elsewhere would take itself for the last.
            with suppress(FileExistsError):
                os.close(os.open(self.index_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def keep_reserve(self) -> bool:
        """Set room aside on the disk, given up so that things can be deleted when it is full; return whether there is any."""
        reserve = self.path / "reserve"
        try:
            if not reserve.exists():
                with open(reserve, "wb", opener=owner_only) as file:
                    file.write(bytes(RESERVE_BYTES))
            return True
        except OSError:
            reserve.unlink(missing_ok=True)
            return False

    def give_up_reserve(self) -> bool:
        """Free the room set aside; return whether there was any."""
        try:
            (self.path / "reserve").unlink()
        except OSError:
            return False
        return True

    def file_path(self, key: str) -> Path:
        return self.path / "kv" / key[:2] / f"{valid_key(key)}{_SUFFIX}"

    def files(self) -> Iterator[tuple[Path, str | None]]:
        """Yield what lies among the chunks' files, and the key where it is one."""
        for shard in sorted((self.path / "kv").glob("*")):
            for path in sorted(shard.iterdir()) if shard.is_dir() else [shard]:
                key = path.name.removesuffix(_SUFFIX)
                yield path, key if _KEY.fullmatch(key) and path == self.file_path(key) else None

    @contextmanager
    def written(self, key: str, buffers: Iterable[memoryview]) -> Iterator[Callable[[], None]]:
        """Write and sync a file outside its place; give what brings it to that of a key's, instead of one that is there."""
        part, final = self.path / "tmp" / f"{secrets.token_hex(8)}.part", self.file_path(key)

        def place() -> None:
            with storing(self.path):
                final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                part.replace(final)

        try:
            with storing(self.path):
                part.parent.mkdir(mode=0o700, exist_ok=True)
                with open(part, "xb", opener=owner_only) as file:
                    file.writelines(buffers)
                    file.flush()
                    os.fsync(file.fileno())
            yield place
        finally:
            part.unlink(missing_ok=True)

    def remove(self, key: str) -> None:
        """Remove the file of a key; where that fails, it is there without an entry."""
        with suppress(OSError, StoreError):
            self.file_path(key).unlink()

    def remove_leftovers(self) -> None:
        """Remove what killed processes have left outside its place."""
        with storing(self.path):
            for path in (self.path / "tmp").glob("*"):
                with suppress(FileNotFoundError):
                    if time.time() - path.stat().st_mtime > _LEFT_S:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _is_store(self) -> bool:
        """Return whether the folder is a store of this version; False where one can be made."""
        names: list[str] = []
        mark: object = None
        try:
            names = sorted(name for name in os.listdir(self.path) if not _MAKING.fullmatch(name))
            mark = json.loads((self.path / _MARK).read_text(encoding="utf-8"))
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            raise StoreFormatError(f"{self.path} is a file; a store needs a folder") from None
        except ValueError:
            mark = "damaged"
        except OSError as error:
            raise StoreError(f"store folder {self.path} cannot be read: {error}") from error
        if not names:
            return False
        if mark is None:
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            raise StoreFormatError(
                f"folder {self.path} is not a store and holds other files ({shown}); give an empty or a new folder"
            )
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


@contextmanager
def locked(path: Path, until: float, otherwise: str) -> Iterator[None]:
    """Hold a lock file, which is made if need be; StoreError if another process holds it until that `time.monotonic`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise StoreError(otherwise) from None
                time.sleep(_POLL_S)
        yield
    finally:
        # Closing alone would leave it locked for as long as a child lives that was forked meanwhile.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def owner_only(path: str, flags: int) -> int:
    """Open a file that is made for its owner alone; an `opener` of `open`."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
