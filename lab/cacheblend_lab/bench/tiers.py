"""Sources that measured KV is read from: files that the operating system has no copy of in memory, and a slower device, emulated.

Reading from the emulated device sleeps until the bytes could have come from such a device, then hands over what lies in RAM;
what the device itself would take from the machine (interrupts, a driver's copies) is not emulated.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from tempfile import TemporaryDirectory

from cacheblend_attachments.auto.measure import forget_pages
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.store import KVReader
from cacheblend_rag.store.kvstore import KVStore
from cacheblend_rag.store.memory import DeviceTier, RamTier
from cacheblend_rag.store.tiers import Tiers

__all__ = ["ColdFolder", "SlowStore", "cached_share", "drop_cached", "stored_files", "temporary_folder"]


class ColdFolder:
    """A folder for a store that is measured from disk, for the time of the measurement.

    Attributes
    ----------
    path : Path
        The store's folder; it is not there yet.
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
    """Make a folder for the time of a measurement, by default where temporary files go."""
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
    """Have the operating system forget what it keeps of these files in memory; they are synced first, or it could not."""
    _check_can_drop()
    for file in files:
        forget_pages(file)


def cached_share(files: Iterable[Path]) -> float | None:
    """Return which share of these files' pages is in memory, or None where the system does not say."""
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
            "the disk tier is measured with an empty page cache, which this system cannot empty; use Linux"
        )


class _Line:
    """The one way from the device, shared by all its readers: bytes queue for it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def carry(self, nbytes: int) -> None:
        """Wait until `nbytes` have come."""
        with self._lock:
            arrives = max(self._free_at, time.perf_counter()) + nbytes / self._bytes_per_s
            self._free_at = arrives
        time.sleep(max(arrives - time.perf_counter(), 0.0))


class _SlowReader(KVReader):
    """Reads another reader's KV no faster than the device that `line` comes from."""

    def __init__(self, reader: KVReader, tier: str, line: _Line) -> None:
        super().__init__(
            reader.token_ids, reader.start, reader.context, reader.num_layers, reader.codec, reader.packed_bytes
        )
        self.tier = tier
        self._reader = reader
        self._line = line

    def layer(self, index: int) -> LayerKV:
        """Return one layer, when it has come."""
        self._line.carry(self.packed_bytes // self.num_layers)
        return self._reader.layer(index)


class SlowStore(KVStore):
    """A store in RAM whose KV comes from an emulated device."""

    def __init__(self, tier: str, bytes_per_s: float, ram_bytes: int = 2**62) -> None:
        super().__init__(Tiers(time.time, DeviceTier(0), RamTier(ram_bytes)))
        self._tier, self._bytes_per_s = tier, bytes_per_s
        self._line = _Line(bytes_per_s)

    def samples(self) -> list[AbstractContextManager[KVStore]]:
        """Return what opens another such device, to be measured."""
        return [closing(SlowStore(self._tier, self._bytes_per_s))]

    def open(self, key: str) -> KVReader | None:
        """Return a reader of the KV under `key`, as slow as the device, or None."""
        reader = super().open(key)
        return None if reader is None else _SlowReader(reader, self._tier, self._line)
