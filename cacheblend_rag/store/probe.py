"""Putting chunks where a tier keeps them, only to measure how fast they are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from cacheblend_rag.codec import Codec, pack_kv
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.base import KVReader
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.device import DeviceReader, DeviceTier
from cacheblend_rag.store.encoded import encode_chunk
from cacheblend_rag.store.folder import StoreFolder
from cacheblend_rag.store.ram import RamReader
from cacheblend_rag.store.writers import storing

__all__ = ["OpenProbe", "TierProbe", "device_probe", "disk_probe", "forget_pages", "ram_probe"]

OpenProbe: TypeAlias = Callable[[], list[KVReader]]
"""Returns new readers of the chunks, cold: nothing of an earlier reading speeds them up."""

TierProbe: TypeAlias = Callable[[Sequence[ChunkKV]], AbstractContextManager[OpenProbe]]
"""Puts chunks into a tier for the duration of a ``with`` block, under no key and no name."""

_KEY = "0" * 32


@contextmanager
def device_probe(tier: DeviceTier, chunks: Sequence[ChunkKV]) -> Iterator[OpenProbe]:
    """Read chunks as the device tier does."""
    resident = [tier.place_all(kv) for kv in chunks]
    yield lambda: [DeviceReader(kv) for kv in resident]


@contextmanager
def ram_probe(codec: Codec, chunks: Sequence[ChunkKV]) -> Iterator[OpenProbe]:
    """Read chunks as the RAM tier does."""
    packed = [pack_kv(kv, codec) for kv in chunks]
    yield lambda: [RamReader(kv) for kv in packed]


@contextmanager
def disk_probe(folder: StoreFolder, codec: Codec, chunks: Sequence[ChunkKV]) -> Iterator[OpenProbe]:
    """Read chunks as the disk tier does, from files in its folder that the system's page cache does not hold.

    Raises
    ------
    StoreError
        If they cannot be written.
    """
    paths = []
    try:
        for kv in chunks:
            # A part of this process's own: if it dies, whoever opens the store next removes it.
            paths.append(folder.writers.new_part())
            with storing(folder.path):
                fd = os.open(paths[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with open(fd, "wb") as file:
                    for buffer in encode_chunk(_KEY, pack_kv(kv, codec)).buffers:
                        file.write(buffer)
                    file.flush()
                    os.fsync(fd)

        def open_cold() -> list[KVReader]:
            for path in paths:
                forget_pages(path)
            return [ChunkFile.open(path, _KEY) for path in paths]

        yield open_cold
    finally:
        for path in paths:
            with suppress(OSError):
                path.unlink()


def forget_pages(path: str | Path) -> None:
    """Have the system drop a file from its page cache, where it offers that (Linux does); it is synced first, or it could not."""
    if hasattr(os, "posix_fadvise"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
