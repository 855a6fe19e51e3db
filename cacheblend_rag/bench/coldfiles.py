"""Files that the operating system has no copy of in memory, so that reading them reads the disk."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store.probe import forget_pages

__all__ = ["cached_share", "drop_cached", "stored_files"]


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
    if not hasattr(os, "posix_fadvise"):
        raise ConfigError(
            "the disk tier is measured with an empty page cache, which this system has no call for; use Linux"
        )
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
