"""The form of the bytes of one chunk's KV: a safetensors file, layer by layer, every byte of it under a checksum.

Layout, in file order::

    8 bytes           length of the header
    header            JSON: the tensors' types, shapes and places, and ``__metadata__`` with the format, the store key,
                      the start position, one checksum (xxh3, 64 bits) a layer, how each layer is unpacked, and, where the
                      chunk was encoded in its document, the digest of the tokens that it was encoded behind
    token_ids         int32
    header_digest     16 bytes, blake2b of everything before it
    layer.0.keys, layer.0.values, layer.1.keys, ...

A layer's tensors are the parts that its codec makes of it (`cacheblend_rag.codec`): ``keys`` and ``values`` where it stays
in floating point, ``keys.grid``, ``values.grid``, ``keys.codes`` and ``values.codes`` where it is quantised. Metadata ``forms``
lists what layers are unpacked to, each as [codec, keys, values] with types and shapes; ``layers`` says which of them each
layer has. Files of format 1 have neither, and no codec; they are read as well.

Any safetensors reader can open it. The digest covers the checksums and the checksums cover the layers, so that reading the
head and one layer is enough to know that this layer is right.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from cacheblend_rag.errors import StoreError

__all__ = [
    "CONTEXT",
    "DIGEST_BYTES",
    "DTYPES",
    "DTYPE_NAMES",
    "FORMAT",
    "FORMAT_WITHOUT_CODECS",
    "digest_of",
    "pack_tokens",
    "unpack_tokens",
]

FORMAT = "cacheblend-rag chunk kv 2"
FORMAT_WITHOUT_CODECS = "cacheblend-rag chunk kv 1"
CONTEXT = "context"
DIGEST_BYTES = 16

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def pack_tokens(token_ids: tuple[int, ...]) -> bytes:
    """Return token ids as little-endian 32 bit integers.

    Raises
    ------
    StoreError
        If one is negative or does not fit.
    """
    if any(not 0 <= token < 2**31 for token in token_ids):
        raise StoreError("token ids must be from 0 to 2**31 - 1 to be stored")
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Return the token ids that `pack_tokens` packed."""
    return tuple(np.frombuffer(data, dtype="<i4").tolist())


def digest_of(data: bytes) -> bytes:
    """Return the digest of a file's first bytes, up to the digest itself."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
