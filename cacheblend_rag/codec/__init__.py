"""Codecs, which represent KV as it is, or quantised, in fewer bytes."""

from __future__ import annotations

from cacheblend_rag.codec.base import (
    NATIVE,
    Codec,
    NativeCodec,
    PackedKV,
    PackedLayer,
    TensorForm,
    main_codec,
)
from cacheblend_rag.codec.quantized import QuantizedCodec
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import ChunkKV, LayerKV

__all__ = [
    "EXACT",
    "Codec",
    "PackedKV",
    "PackedLayer",
    "TensorForm",
    "codec_names",
    "main_codec",
    "make_codec",
    "pack_kv",
    "repack_layer",
    "unpack_layer",
]

EXACT = NativeCodec("exact")
"""Keeps KV as it is in every tier, whatever codec the tier keeps chunks in; settings cannot choose it."""

# Stored bytes name their codec: what a name stands for may change only in what `unpack` does not need to know.
_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        NATIVE,
        EXACT,
        QuantizedCodec("int8", bits=8, group_size=128, values_along="channel"),
        QuantizedCodec("int4", bits=4, group_size=32, values_along="token"),
    )
}


def codec_names() -> tuple[str, ...]:
    """Return the names of all codecs that can be chosen."""
    return tuple(name for name in _CODECS if name != EXACT.name)


def make_codec(name: str) -> Codec:
    """Return the codec of this name; ConfigError if there is none."""
    codec = _CODECS.get(name)
    if codec is None:
        raise ConfigError(f"unknown codec {name!r}; choose one of {', '.join(codec_names())}")
    return codec


def unpack_layer(packed: PackedLayer) -> LayerKV:
    """Return what was packed, by whatever codec."""
    return _CODECS[packed.codec].unpack(packed)


def repack_layer(packed: PackedLayer, codec: Codec) -> PackedLayer:
    """Return a layer packed by `codec`, or as it is if that is exact, or gains nothing; "native" unpacks it."""
    if packed.codec in (codec.name, EXACT.name):
        return packed
    repacked = codec.pack(unpack_layer(packed))
    return repacked if codec.name == "native" or repacked.nbytes < packed.nbytes else packed


def pack_kv(kv: ChunkKV | PackedKV, codec: Codec) -> PackedKV:
    """Return a chunk's KV as `codec` keeps it; see `repack_layer` for KV that is packed already."""
    if isinstance(kv, ChunkKV):
        layers = tuple(codec.pack(layer) for layer in kv.layers)
    else:
        layers = tuple(repack_layer(layer, codec) for layer in kv.layers)
    return PackedKV(kv.token_ids, kv.start, layers, kv.context)
