"""A folder of stored KV of which the operating system keeps nothing in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from cacheblend_rag.errors import ConfigError

__all__ = ["cold_folder", "drop_cached", "still_cached"]


@contextmanager
def cold_folder(parent: Path | None) -> Iterator[Path]:
    """Make a folder for a store for the time of a measurement, by default where temporary files go."""
    if not hasattr(os, "posix_fadvise"):
        raise ConfigError("the disk is measured with an empty page cache, which this system cannot empty; use Linux")
    with TemporaryDirectory(prefix="cacheblend-bench-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder) / "kv"


def drop_cached(folder: Path) -> None:
    """Have the operating system forget what it keeps of a store's files in memory; they are synced first, or it could not."""
    for file in folder.rglob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def still_cached(folder: Path) -> bool:
    """Whether any file of a store begins in memory after all, so that times from it are not the disk's."""
    drop_cached(folder)
    for file in folder.rglob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
            return True
        except BlockingIOError:
            continue
        except OSError:
            # A file system in memory does not know the flag.
            return True
        finally:
            os.close(descriptor)
    return False
