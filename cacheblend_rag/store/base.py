"""What a store says about chunks: records of names, figures, and readers of their KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from logging import getLogger

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

__all__ = [
    "KVReader",
    "Later",
    "NameChanges",
    "NodeRecord",
    "PromotingReader",
    "RamReader",
    "StoreStats",
    "packed_kv",
    "part_of",
]

_log = getLogger(__name__)


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
    """Figures of a store, or of what one tenant has in it; evictions count since the store was opened.

    Attributes
    ----------
    nodes, entries : int
        Named chunks of all models, and chunks whose KV is held.
    ram_bytes, disk_bytes : int
        Bytes of KV in RAM, and of files on disk.
    evictions, ram_evictions : int
        Entries dropped for room, and copies dropped for room in RAM. Without a folder both count what is dropped from RAM.
    """

    nodes: int
    entries: int
    ram_bytes: int
    disk_bytes: int
    evictions: int
    ram_evictions: int
