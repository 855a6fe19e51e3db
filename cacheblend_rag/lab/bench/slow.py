"""A slower device, emulated: stored KV that arrives at a given rate.

Reading sleeps until the bytes could have come from such a device, then hands over what lies in RAM; what the device itself
would take from the machine (interrupts, a driver's copies) is not emulated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from cacheblend_rag.codec import make_codec
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store import KVReader, StoreClock
from cacheblend_rag.store.base import TierProbe
from cacheblend_rag.store.device import DeviceTier
from cacheblend_rag.store.memory import MemoryStore
from cacheblend_rag.store.ram import RamTier, ram_probe

__all__ = ["SlowReader", "SlowStore", "device_rate"]


def device_rate(tier: str) -> float | None:
    """Return the bytes per second of the device that a name such as "200MB/s" emulates, or None for "ram" and "disk".

    Raises
    ------
    ConfigError
        If it is neither.
    """
    if tier in ("ram", "disk"):
        return None
    try:
        rate = float(tier.removesuffix("MB/s"))
    except ValueError:
        rate = 0.0
    if not tier.endswith("MB/s") or not 0 < rate < float("inf"):
        raise ConfigError(f"tier {tier!r} is unknown; give ram, disk, or a rate such as 200MB/s")
    return rate * 1e6


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


class SlowReader(KVReader):
    """Reads another reader's KV no faster than the device.

    Parameters
    ----------
    reader : KVReader
        What is read.
    tier : str
        The name of the device.
    line : _Line
        The way from it.
    """

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


class SlowStore(MemoryStore):
    """A store in RAM whose KV comes from an emulated device.

    Parameters
    ----------
    tier : str
        The name of the device.
    bytes_per_s : float
        How fast it is.
    ram_bytes : int
        Most bytes of KV held.
    """

    def __init__(self, tier: str, bytes_per_s: float, ram_bytes: int = 2**62) -> None:
        super().__init__(RamTier(ram_bytes), DeviceTier(0), StoreClock())
        self._tier = tier
        self._line = _Line(bytes_per_s)

    def probes(self) -> list[TierProbe]:
        """Return the device, to be measured."""

        @contextmanager
        def probe(chunks: Sequence[ChunkKV]) -> Iterator[Callable[[], list[KVReader]]]:
            with ram_probe(make_codec("native"), chunks) as open_readers:
                yield lambda: [SlowReader(reader, self._tier, self._line) for reader in open_readers()]

        return [probe]

    def open(self, key: str) -> KVReader | None:
        """Return a reader of the KV under `key`, as slow as the device, or None."""
        reader = super().open(key)
        return None if reader is None else SlowReader(reader, self._tier, self._line)
