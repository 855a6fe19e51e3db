"""What a store says about chunks: records of names, targets, figures, and readers of their KV."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from cacheblend_rag.kv import LayerKV

__all__ = [
    "Entry",
    "Fate",
    "KVReader",
    "Later",
    "NameChanges",
    "NodeRecord",
    "StoreStats",
    "count_of",
    "earliest",
    "latest",
    "part_of",
]


class KVReader:
    """Reads the stored KV of one chunk, layer by layer, from any number of threads at once.

    `tier` says where the bytes are: "device", "ram", "disk", or what a remote tier calls itself. Most layers are packed there by
    `codec`, all of them in `packed_bytes`. The KV is of `token_ids`; the keys of the first are rotated to position `start`.
    `context` is the digest of the tokens that it was read behind, beside the preamble; empty if there were none.
    """

    tier: str
    promotes_to_device = False
    """Whether the device tier is to get what is read: `keep` is then called with each layer."""
    devices: tuple[torch.device, ...] = ()
    """Where each layer is resident; empty where the KV is in no device tier."""

    def __init__(
        self, token_ids: tuple[int, ...], start: int, context: str, num_layers: int, codec: str, packed_bytes: int
    ) -> None:
        self.token_ids, self.start, self.context = token_ids, start, context
        self.num_layers, self.codec, self.packed_bytes = num_layers, codec, packed_bytes

    def layer(self, index: int) -> LayerKV:
        """Return one layer, ``(num_kv_heads, seq_len, head_dim)``, on the CPU, for reading alone, or raise `ChunkReadError`."""
        raise NotImplementedError

    def resident(self, index: int) -> LayerKV:
        """Return one layer where it is, for work in the current stream; the caller must not write to it."""
        return self.layer(index)

    def keep(self, index: int, layer: LayerKV) -> None:
        """Copy a layer that was read, its keys as stored, to the device tier in the current stream, if that is to get it."""

    def finish(self) -> None:
        """Say that no further layer is read or kept; what was read, or kept, for the most part enters RAM, or the device tier."""


def part_of(reader: KVReader, start: int, stop: int) -> KVReader:
    """Return a reader of the tokens from `start` to before `stop` of what `reader` reads; none of it goes to the device tier."""
    return _Part(reader, slice(start, stop))


class _Part(KVReader):
    def __init__(self, reader: KVReader, rows: slice) -> None:
        ids = reader.token_ids[rows]
        nbytes = reader.packed_bytes * len(ids) // len(reader.token_ids)
        super().__init__(ids, reader.start + rows.start, reader.context, reader.num_layers, reader.codec, nbytes)
        self.tier, self.devices = reader.tier, reader.devices
        self._reader, self._rows = reader, rows

    def layer(self, index: int) -> LayerKV:
        return LayerKV(*(tensor[:, self._rows] for tensor in self._reader.layer(index)))

    def resident(self, index: int) -> LayerKV:
        return LayerKV(*(tensor[:, self._rows] for tensor in self._reader.resident(index)))

    def finish(self) -> None:
        self._reader.finish()


Fate: TypeAlias = Literal["unreachable", "damaged", "evicted"]
"""Why KV is not to be had: the remote tier does not answer, it was found damaged, or it was dropped for room or because its time
was over."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The KV of one chunk in a tier, or on its way: whose it is and until when, in memory the KV itself, and its size."""

    tenant: str = ""
    expires_at: float | None = None
    nbytes: int = 0
    added_at: float = 0.0
    kv: Any = None
    # Whether the remote tier has it.
    is_copy: bool = False
    # What KV without a name goes with: a namespace, and ids there.
    tied: tuple[str, frozenset[str]] | None = None

    def is_live(self, now: float) -> bool:
        return self.expires_at is None or self.expires_at > now


@dataclass(frozen=True, slots=True)
class Later:
    """The KV of a chunk that stands behind another one in a prompt: its key, and what it is read behind, beside the preamble."""

    key: str
    behind: tuple[int, ...]
    # The ids and keys of the chunks whose text is among that: with any of them the KV goes.
    seen: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What the store knows of a named chunk, whether or not its KV is held at the moment."""

    id: str
    # Of its KV right behind the preamble, which serves the first chunk of a prompt.
    key: str
    # `cacheblend_rag.chunk.text_hash` of its text.
    text_hash: str
    token_ids: tuple[int, ...]
    # Tokens after them of which there is KV too.
    separator: tuple[int, ...] = ()
    # The document that it is a piece of, and where its body begins there, in characters; None where that is not known.
    document: str | None = None
    start: int | None = None
    # Characters of its body, and for each of its tokens how many of them have ended with it; only with a `start`.
    length: int = 0
    ends: tuple[int, ...] = field(default=(), compare=False)
    # Of its KV behind another chunk; None where that is still to be chosen, or is the same.
    later: Later | None = field(default=None, compare=False)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all of its KV."""
        return (self.key,) if self.later is None else (self.key, self.later.key)


@dataclass(frozen=True, slots=True)
class NameChanges:
    """What became of the names of a namespace since an earlier call; `mark` is what to ask with the next time."""

    mark: int
    # Whether these are all names, rather than those that changed.
    whole: bool
    # The number of each, which it keeps, its id, and the digest of its text; the number alone where it is gone.
    names: list[tuple[int, str | None, str | None]]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Figures of a store, or of what one tenant has in it; evictions and `unwritten` count since the store was opened.

    Attributes
    ----------
    nodes, entries : int
        Named chunks of all models, and chunks whose KV is held.
    ram_bytes, disk_bytes, device_bytes : int
        Bytes of KV in RAM, of files on disk, and of KV on the devices that compute.
    evictions, ram_evictions, device_evictions : int
        Entries dropped for room; copies dropped for room in RAM, and on devices. What is dropped from RAM without a folder is
        counted by both.
    waiting, waiting_bytes : int
        Chunks that wait to be written, and bytes of their KV.
    unwritten : int
        Misses that found no room to wait in and were not stored.
    """

    nodes: int
    entries: int
    ram_bytes: int
    disk_bytes: int
    evictions: int
    waiting: int = 0
    waiting_bytes: int = 0
    unwritten: int = 0
    device_bytes: int = 0
    ram_evictions: int = 0
    device_evictions: int = 0


def count_of(counts: Counter[str], tenant: str | None) -> int:
    """Return what was counted for a tenant, or for all."""
    return counts.total() if tenant is None else counts[tenant]


def earliest(one: float | None, other: float | None) -> float | None:
    """Return the earlier of two times at which something expires, or the shorter of two lives; None is never."""
    return other if one is None or (other is not None and other < one) else one


def latest(one: float | None, other: float | None) -> float | None:
    """Return the later of two times at which something expires; None is never."""
    return None if one is None or other is None else max(one, other)
