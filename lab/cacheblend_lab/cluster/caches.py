"""Contents of each tier of each replica: caches that are played through, chunk by chunk.

A chunk has two KVs, one for the first place of a prompt and one for the places behind others; each is kept for itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cacheblend_lab.cluster.costs import Reads
from cacheblend_rag.errors import ConfigError

__all__ = ["Caches", "Capacities", "LruCaches"]


@dataclass(frozen=True, slots=True)
class Capacities:
    """Room for KV, in bytes: RAM and disk of each replica, and the remote tier's, which all share; None is enough for all."""

    ram_bytes: float
    disk_bytes: float
    remote_bytes: float | None = None

    def __post_init__(self) -> None:
        if min(self.ram_bytes, self.disk_bytes, self.remote_bytes or 0) < 0:
            raise ConfigError(f"{self} has less room than none")

    def chunks(self, chunk_bytes: float) -> tuple[int, int, int | None]:
        """Return how many KVs of chunks of one size fit into each."""
        remote = None if self.remote_bytes is None else int(self.remote_bytes / chunk_bytes)
        return int(self.ram_bytes / chunk_bytes), int(self.disk_bytes / chunk_bytes), remote


class Caches(Protocol):
    """Says where a request's chunks are."""

    def read(self, replica: int, chunks: Sequence[int], homes: Sequence[int]) -> Reads:
        """Return where the chunks are for a replica, which has them from then on; `homes` are the chunks' own replicas."""


class _Lru:
    """KV of chunks of one size, the least recently used dropped first."""

    def __init__(self, room: int | None) -> None:
        self._room = room
        self._held: OrderedDict[tuple[int, bool], None] = OrderedDict()

    def use(self, kv: tuple[int, bool]) -> bool:
        """Return whether KV is held; it is from then on."""
        if kv in self._held:
            self._held.move_to_end(kv)
            return True
        if self._room != 0:
            self._held[kv] = None
            if self._room is not None and len(self._held) > self._room:
                self._held.popitem(last=False)
        return False


class LruCaches:
    """Every chunk in every tier, as the store does it: what is used is in RAM and on disk from then on.

    With `holds_all`, the remote tier has the corpus at the start.
    """

    def __init__(self, replicas: int, capacities: Capacities, chunk_bytes: float, *, holds_all: bool = True) -> None:
        ram, disk, remote = capacities.chunks(chunk_bytes)
        self._ram = [_Lru(ram) for _ in range(replicas)]
        self._disk = [_Lru(disk) for _ in range(replicas)]
        self._remote = None if remote is None and holds_all else _Lru(remote)

    def read(self, replica: int, chunks: Sequence[int], homes: Sequence[int]) -> Reads:
        """Return where the chunks are, and put them into the replica's tiers."""
        counts = [0, 0, 0, 0]
        ram, disk = self._ram[replica], self._disk[replica]
        for place, chunk in enumerate(chunks):
            kv = chunk, place == 0
            in_ram, on_disk = ram.use(kv), disk.use(kv)
            if in_ram:
                counts[0] += 1
            elif on_disk:
                counts[1] += 1
            else:
                # Who has it near does not ask for it there, so that it is not used there.
                counts[2 if self._remote is None or self._remote.use(kv) else 3] += 1
        return Reads(*counts)
