"""How KV is represented in fewer bytes: as is, in narrower floats, or quantised."""

from __future__ import annotations

from cacheblend_rag.codec.base import Codec, PackedKV, PackedLayer, TensorForm, main_codec
from cacheblend_rag.codec.registry import EXACT, codec_names, make_codec, pack_kv, repack_layer, unpack_layer

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
