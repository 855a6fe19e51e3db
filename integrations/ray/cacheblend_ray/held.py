"""What a replica says that it holds: the chunks and documents of the last answers, as far as its memory reaches."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from cacheblend_rag.errors import CacheBlendError
from cacheblend_ray.nearness import name_number, pack_numbers

__all__ = ["HeldNames"]

# Of what is told, the names of latest use.
_MOST_TOLD = 16_384


# A chunk's namespace, which is a tenant's own, and its id.
Name = tuple[str, str]


class Placing(Protocol):
    """Chunks of one tenant, and their documents."""

    namespace: str

    def places(self, ids: Sequence[str], /) -> Sequence[str | None]:
        """Return the documents of chunks."""


class HeldNames:
    """The chunks that were used last, by ids, with the document of each: what RAM has room for, and what the disk has.

    The same id of two tenants is two chunks. It mirrors the store's own LRU, as far as answers tell its order and sizes. Where it
    is wrong, a request goes to a replica that reads from farther away than was thought.

    Parameters
    ----------
    ram_bytes, disk_bytes : int
        What each has room for; 0 for a disk that there is not.
    """

    def __init__(self, ram_bytes: int, disk_bytes: int) -> None:
        self._limits = (ram_bytes, disk_bytes)
        self._tiers: tuple[OrderedDict[Name, int], OrderedDict[Name, int]] = (OrderedDict(), OrderedDict())
        self._used = [0, 0]
        self._documents: dict[Name, str | None] = {}
        self._lock = threading.Lock()
        self._said = 0

    def note(self, library: Placing, chunks: Iterable[tuple[str, int]]) -> None:
        """Take note of chunks of a library that were used, by id, and the bytes of each."""
        sizes = {(library.namespace, id): nbytes for id, nbytes in chunks}
        with self._lock:
            unknown = [name for name in sizes if name not in self._documents]
        found: dict[Name, str | None] = {}
        with suppress(CacheBlendError):
            # Where names cannot be asked now, they are the next time.
            found = dict(zip(unknown, library.places([id for _, id in unknown]), strict=True)) if unknown else {}
        with self._lock:
            self._documents |= found
            for name, nbytes in sizes.items():
                self._keep(0, name, nbytes)

    def told(self) -> dict[str, object]:
        """Return what the router is told: a number that rises, and what RAM and disk hold."""
        with self._lock:
            self._said += 1
            ram, disk = (self._names(tier) for tier in self._tiers)
            return {"said": self._said, "ram": pack_numbers(ram), "disk": pack_numbers(disk)}

    def _keep(self, level: int, name: Name, nbytes: int) -> None:
        tier = self._tiers[level]
        self._used[level] += nbytes - tier.pop(name, 0)
        tier[name] = nbytes
        while self._used[level] > self._limits[level] and tier:
            old, size = tier.popitem(last=False)
            self._used[level] -= size
            if level == 0:
                self._keep(1, old, size)
            elif old not in self._tiers[0]:
                self._documents.pop(old, None)

    def _names(self, tier: OrderedDict[Name, int]) -> list[int]:
        names: Counter[str] = Counter()
        for name in reversed(tier):
            document = self._documents.get(name)
            names[name[1]] += 1
            if document is not None:
                names[document] += 1
            if len(names) >= _MOST_TOLD:
                break
        return [name_number(name) for name in names]
