"""Files that the operating system has no copy of in memory, so that reading them reads the disk."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store.disk import forget_pages

__all__ = ["ColdFolder", "cached_share", "drop_cached", "stored_files", "temporary_folder"]


class ColdFolder:
    """A folder for a store that is measured from disk, for the time of the measurement.

    Parameters
    ----------
    parent : Path or None
        Where it is made; by default where temporary files go.

    Attributes
    ----------
    path : Path
        The store's folder; it is not there yet.

    Raises
    ------
    ConfigError
        If no folder can be made there, or this system cannot empty the page cache of a file.
    """

    def __init__(self, parent: Path | None) -> None:
        _check_can_drop()
        self._temporary = temporary_folder(parent)
        self.path = Path(self._temporary.name) / "kv"

    @property
    def files(self) -> list[Path]:
        """The chunk files of the store, in the order of their names."""
        return stored_files(self.path)

    @property
    def file_bytes(self) -> int:
        """Bytes of these files."""
        return sum(file.stat().st_size for file in self.files)

    def drop_cached(self) -> None:
        """Have the operating system forget what it keeps of these files in memory."""
        drop_cached(self.files)

    def cached_share_after_drop(self) -> float | None:
        """Return which share of these files is in memory after all; None where the system does not say."""
        self.drop_cached()
        return cached_share(self.files)

    def remove(self) -> None:
        """Remove the folder and all that is in it."""
        self._temporary.cleanup()


def temporary_folder(parent: Path | None) -> TemporaryDirectory[str]:
    """Make a folder for the time of a measurement, by default where temporary files go.

    Raises
    ------
    ConfigError
        If none can be made there.
    """
    try:
        return TemporaryDirectory(prefix="cacheblend-bench-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"no folder can be made in {parent or 'the folder of temporary files'} ({error.strerror}); name another one"
        ) from error


def stored_files(folder: Path) -> list[Path]:
    """Return the chunk files of a store, in the order of their names."""
    return sorted(folder.rglob("*.safetensors"))


def drop_cached(files: Iterable[Path]) -> None:
    """Have the operating system forget what it keeps of these files in memory; they are synced first, or it could not.

    Raises
    ------
    ConfigError
        If this operating system has no call for it.
    """
    _check_can_drop()
    for file in files:
        forget_pages(file)


def cached_share(files: Iterable[Path]) -> float | None:
    """Return which share of these files' pages is in memory, or None where the system does not say.

    Parameters
    ----------
    files : iterable of Path
        Files of ours.

    Returns
    -------
    float or None
        From 0, all on the disk alone, to 1.
    """
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    if mincore is None:
        return None
    pages = cached = 0
    for file in files:
        with file.open("rb") as opened:
            # A private copy on write gives ctypes an address; nothing is written, and mapping reads nothing.
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
                count = -(-len(mapped) // mmap.PAGESIZE)
                found = (ctypes.c_ubyte * count)()
                start = ctypes.c_char.from_buffer(mapped)
                failed = mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), found)
                del start
        if failed:
            return None
        pages += count
        cached += sum(byte & 1 for byte in found)
    return cached / pages if pages else None


def _check_can_drop() -> None:
    if not hasattr(os, "posix_fadvise"):
        raise ConfigError(
            "the disk tier is measured with an empty page cache, which this system has no call for; use Linux"
        )
