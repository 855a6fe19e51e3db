"""KV in RAM, and what reads KV wherever it is."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any

import torch

from cacheblend_rag.codec import (
    Codec,
    PackedKV,
    PackedLayer,
    main_codec,
    make_codec,
    pack_kv,
    repack_layer,
    unpack_layer,
)
from cacheblend_rag.errors import ChunkReadError
from cacheblend_rag.kv import ChunkKV, LayerKV

__all__ = ["Entry", "KVReader", "PromotingReader", "RamReader", "RamTier", "packed_kv", "part_of"]

_log = getLogger(__name__)

# Of the limit: when so much was dropped, it is given back to the system, for glibc keeps freed pieces of this size.
_PARTS_RETURNED = 16
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


class KVReader:
    """Reads the stored KV of one chunk, layer by layer, from any number of threads at once.

    `tier` says where the bytes are: "ram", "disk", or what a remote tier calls itself; "device" for KV that no store holds, on
    the devices of its layers. Most layers are packed there by `codec`, all of them in `packed_bytes`. The KV is of `token_ids`;
    the keys of the first are rotated to position `start`. `context` is the digest of the tokens that it was read behind, beside
    the preamble; empty if there were none.
    """

    tier: str

    def __init__(
        self, token_ids: tuple[int, ...], start: int, context: str, num_layers: int, codec: str, packed_bytes: int
    ) -> None:
        self.token_ids, self.start, self.context = token_ids, start, context
        self.num_layers, self.codec, self.packed_bytes = num_layers, codec, packed_bytes

    def packed_layer(self, index: int) -> PackedLayer:
        """Return one layer as it is packed, or raise `ChunkReadError`."""
        raise NotImplementedError

    def layer(self, index: int) -> LayerKV:
        """Return one layer, ``(num_kv_heads, seq_len, head_dim)``, for reading alone, or raise `ChunkReadError`."""
        return unpack_layer(self.packed_layer(index))

    def finish(self) -> None:
        """Say that no further layer is read; what was read for the most part may enter RAM."""


def packed_kv(reader: KVReader) -> PackedKV:
    """Return all that a reader reads."""
    layers = [reader.packed_layer(index) for index in range(reader.num_layers)]
    return PackedKV(reader.token_ids, reader.start, layers, reader.context)


def part_of(reader: KVReader, start: int, stop: int) -> KVReader:
    """Return a reader of the tokens from `start` to before `stop` of what `reader` reads."""
    return _Part(reader, slice(start, stop))


class _Part(KVReader):
    def __init__(self, reader: KVReader, rows: slice) -> None:
        ids = reader.token_ids[rows]
        nbytes = reader.packed_bytes * len(ids) // len(reader.token_ids)
        super().__init__(ids, reader.start + rows.start, reader.context, reader.num_layers, reader.codec, nbytes)
        self.tier, self._reader, self._rows = reader.tier, reader, rows

    def layer(self, index: int) -> LayerKV:
        return LayerKV(*(tensor[:, self._rows] for tensor in self._reader.layer(index)))

    def finish(self) -> None:
        self._reader.finish()


class RamReader(KVReader):
    """Reads KV that is held in RAM, packed or as it is."""

    tier = "ram"

    def __init__(self, kv: PackedKV | ChunkKV) -> None:
        self._kv = packed = kv if isinstance(kv, PackedKV) else pack_kv(kv, make_codec("native"))
        codec = main_codec([layer.codec for layer in packed.layers])
        super().__init__(packed.token_ids, packed.start, packed.context, len(packed.layers), codec, packed.nbytes)

    def packed_layer(self, index: int) -> PackedLayer:
        return self._kv.layers[index]


class PromotingReader(KVReader):
    """Reads each layer of `source` once, packs it by `codec`, and hands the chunk to `keep` in `finish`."""

    def __init__(self, source: KVReader, codec: Codec, keep: Callable[[PackedKV], None]) -> None:
        chunk = source.token_ids, source.start, source.context
        super().__init__(*chunk, source.num_layers, source.codec, source.packed_bytes)
        self.tier = source.tier
        self._source, self._codec, self._keep = source, codec, keep
        self._layers: dict[int, PackedLayer] = {}

    def packed_layer(self, index: int) -> PackedLayer:
        if index not in self._layers:
            self._layers[index] = repack_layer(self._source.packed_layer(index), self._codec)
        return self._layers[index]

    def finish(self) -> None:
        """Hand the chunk over, unless most of it is wanting; the few layers not asked for, their KV being computed, are read."""
        if 2 * len(self._layers) < self.num_layers:
            return
        try:
            layers = [self.packed_layer(index) for index in range(self.num_layers)]
        except ChunkReadError as error:
            _log.warning("%s", error)
        else:
            self._layers = {}
            self._keep(PackedKV(self.token_ids, self.start, layers, self.context))


@dataclass(frozen=True, slots=True)
class Entry:
    """The KV of one chunk in RAM, and whose it is."""

    kv: PackedKV
    tenant: str = ""
    # Whether it is good only as long as the disk holds it too.
    is_copy: bool = False
    # Whether it is still to be written: it stays as it is, and is not dropped for room.
    waits: bool = False
    # What KV without a name goes with: a namespace, and ids there.
    tied: tuple[str, frozenset[str]] | None = None


class RamTier:
    """Chunk KV in RAM by key, at most `limit_bytes` packed by `codec`, the least recently used dropped first.

    It is page-locked, for CUDA to copy without the processor, if that is wanted and possible. Any thread may call any method.
    """

    def __init__(self, limit_bytes: int, codec: Codec, page_locked: bool = False) -> None:
        self.limit_bytes, self.codec = limit_bytes, codec
        self.evicted: Counter[str] = Counter()
        self._page_locked = page_locked
        self._lock = threading.RLock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._used_bytes = 0
        self._unreturned_bytes = 0

    def get(self, key: str) -> Entry | None:
        """Return what is held under `key` and mark it as recently used."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def peek(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def keep(self, key: str, kv: ChunkKV | PackedKV, tenant: str = "", **role: Any) -> bool:
        """Keep KV, dropping the least recently used for room; return whether there was any. `role` is as in `Entry`."""
        if role.get("waits"):
            packed = kv if isinstance(kv, PackedKV) else pack_kv(kv, make_codec("native"))
        else:
            packed = pack_kv(kv, self.codec)
            packed = self._settled(packed) if packed.nbytes <= self.limit_bytes else packed
        nbytes = packed.nbytes
        with self._lock:
            self.drop([key])
            if nbytes > self.limit_bytes:
                return False
            while self._used_bytes + nbytes > self.limit_bytes:
                oldest = next((each for each, entry in self._entries.items() if not entry.waits), None)
                if oldest is None:
                    return False
                self.evicted[self._entries[oldest].tenant] += 1
                self._unreturned_bytes += self._entries[oldest].kv.nbytes
                self.drop([oldest])
            if _trim is not None and self._unreturned_bytes > self.limit_bytes / _PARTS_RETURNED:
                _trim(0)
                self._unreturned_bytes = 0
            self._entries[key] = Entry(packed, tenant, **role)
            self._used_bytes += nbytes
            return True

    def drop(self, keys: Iterable[str]) -> None:
        with self._lock:
            for entry in filter(None, [self._entries.pop(key, None) for key in keys]):
                self._used_bytes -= entry.kv.nbytes

    def keys(self, tenant: str | None = None, copies: bool = False) -> list[str]:
        """Return all keys, or those of a tenant, or of what is a copy."""
        with self._lock:
            entries = [each for each in self._entries.items() if tenant in (None, each[1].tenant)]
        return [key for key, entry in entries if entry.is_copy or not copies]

    def tied(self, namespace: str, ids: Collection[str]) -> list[str]:
        """Return the keys of what is tied to one of the ids."""
        with self._lock:
            ties = [(key, entry.tied) for key, entry in self._entries.items() if entry.tied is not None]
        return [key for key, (space, own) in ties if space == namespace and not own.isdisjoint(ids)]

    def nbytes(self, tenant: str | None = None) -> int:
        with self._lock:
            return sum(entry.kv.nbytes for entry in self._entries.values() if tenant in (None, entry.tenant))

    def _settled(self, kv: PackedKV) -> PackedKV:
        """Return KV in memory of its own, page-locked if that is wanted and possible."""

        def settled(part: torch.Tensor, layer: PackedLayer) -> torch.Tensor:
            try:
                if self._page_locked:
                    return part.pin_memory()
            except RuntimeError as error:
                self._page_locked = False
                _log.warning(
                    "KV is kept in ordinary memory, since page-locked memory is unavailable: %s (set page_locked=False, or a "
                    "smaller ram_bytes; this warning is not repeated)",
                    str(error).partition("\n")[0],
                )
            # What is a view into something larger, but not of its layer alone, as read from a file, would keep that uncounted.
            return part.clone() if part.untyped_storage().nbytes() > layer.nbytes else part

        layers = [
            replace(layer, parts={name: settled(part, layer) for name, part in layer.parts.items()})
            for layer in kv.layers
        ]
        return PackedKV(kv.token_ids, kv.start, layers, kv.context)
