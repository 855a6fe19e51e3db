"""Who is writing to a store folder, and what the dead have left."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cacheblend_rag.errors import StoreError, StoreFullError, StoreReadOnlyError
from cacheblend_rag.store.locks import ForkSafeLock

__all__ = ["Writers", "storing"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn the errors of writing below `path` into the store's own."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFullError(
                f"no room left on the disk of {path}; free some, or give the store a byte budget (disk_bytes)"
            ) from error
        if error.errno in _READ_ONLY:
            raise StoreReadOnlyError(
                f"store folder {path} may not be written ({error.strerror}); it can only be read"
            ) from error
        raise StoreError(f"store folder {path} cannot be written: {error}") from error


class Writers:
    """The processes that write to a store folder, each under a name of its own.

    A writer holds a lock file for as long as it lives; the system lets go of the lock when the process ends, however it ends. Its
    temporary files, and what the index says it was about to do, carry its name.

    Parameters
    ----------
    path : Path
        Where the lock files and temporary files lie.
    read_only : bool
        Whether nothing may be written there.
    """

    def __init__(self, path: Path, read_only: bool) -> None:
        self._path = path
        self._read_only = read_only
        self._lock = ForkSafeLock()
        self._own = ""
        self._fd = -1
        self._pid = 0
        self._parts = 0

    def own(self) -> str:
        """Return the name under which this process writes."""
        with self._lock:
            return self._own_locked()

    def new_part(self) -> Path:
        """Return where to write a file that is not yet complete."""
        with self._lock:
            self._parts += 1
            return self._path / f"{self._own_locked()}.{self._parts}.part"

    def is_alive(self, writer: str) -> bool:
        """Return whether the process that writes under this name still runs; if not, its lock file is removed."""
        if writer == self._own and self._pid == os.getpid():
            return True
        path = self._lock_path(writer)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except PermissionError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            if not self._read_only:
                path.unlink(missing_ok=True)
            return False
        finally:
            os.close(fd)

    def leftovers(self) -> list[Path]:
        """Return the temporary files whose writer is dead."""
        files = sorted(self._path.iterdir())
        dead = {writer for writer in {file.name.partition(".")[0] for file in files} if not self.is_alive(writer)}
        return [file for file in files if file.name.partition(".")[0] in dead and file.suffix != ".lock"]

    def close(self) -> None:
        """Stop writing under this process's name."""
        with self._lock:
            if self._fd >= 0 and self._pid == os.getpid():
                self._lock_path(self._own).unlink(missing_ok=True)
                os.close(self._fd)
            self._own, self._fd = "", -1

    def __del__(self, close: Callable[[int], None] = os.close, pid: Callable[[], int] = os.getpid) -> None:
        # Takes no lock, being a finalizer. The lock file left behind counts as a dead writer's from now on.
        if self._fd >= 0 and self._pid == pid():
            close(self._fd)

    def _own_locked(self) -> str:
        if self._own and self._pid == os.getpid():
            return self._own
        if self._fd >= 0:
            # Inherited over a fork: the parent goes on writing under that name.
            os.close(self._fd)
            self._fd = -1
        with storing(self._path.parent):
            while True:
                writer = secrets.token_hex(8)
                fd = os.open(self._lock_path(writer), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                fcntl.flock(fd, fcntl.LOCK_EX)
                # Between the two calls another process may have taken it for a dead writer's and removed it.
                if os.fstat(fd).st_nlink:
                    break
                os.close(fd)
        self._own, self._fd, self._pid = writer, fd, os.getpid()
        return writer

    def _lock_path(self, writer: str) -> Path:
        return self._path / f"{writer}.lock"
