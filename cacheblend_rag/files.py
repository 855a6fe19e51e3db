"""Files that are replaced at once, locked, or their owner's alone."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from cacheblend_rag.errors import StoreError

__all__ = ["locked", "owner_only", "replace_text"]

_POLL_S = 0.002


def replace_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file, its line ends as they are, so that it is there completely or not at all."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with open(fd, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
