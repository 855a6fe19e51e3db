"""Making the file of one chunk, in the form of `cacheblend_rag.store.chunkformat`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from cacheblend_rag.codec import PackedKV, TensorForm, make_codec, pack_kv
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.chunkformat import (
    CONTEXT,
    DIGEST_BYTES,
    DTYPE_NAMES,
    FORMAT,
    digest_of,
    pack_tokens,
)

__all__ = ["EncodedChunk", "encode_chunk"]


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk's file, not yet written.

    Attributes
    ----------
    buffers : list of memoryview
        The file's bytes in order; they share memory with the KV.
    digest : bytes
        The header digest, which tells this file from any other.
    nbytes : int
        Size of the file.
    """

    buffers: list[memoryview]
    digest: bytes
    nbytes: int


def encode_chunk(key: str, kv: ChunkKV | PackedKV) -> EncodedChunk:
    """Lay out the file of one chunk.

    Parameters
    ----------
    key : str
        The store key, kept in the file so that a misplaced file is not mistaken for another chunk's.
    kv : ChunkKV or PackedKV
        The KV, on the CPU; as it is, or packed by any codec.

    Returns
    -------
    EncodedChunk
        The bytes to write, and what the index remembers of them.

    Raises
    ------
    StoreError
        If a tensor is of a type that the format does not know.
    """
    tokens = pack_tokens(kv.token_ids)
    packed = pack_kv(kv, make_codec("native")) if isinstance(kv, ChunkKV) else kv
    tensors: dict[str, Any] = {}
    place = 0

    def describe(name: str, dtype: str, shape: list[int], nbytes: int) -> None:
        nonlocal place
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + nbytes]}
        place += nbytes

    describe("token_ids", "I32", [len(kv.token_ids)], len(tokens))
    describe("header_digest", "U8", [DIGEST_BYTES], DIGEST_BYTES)
    payload: list[memoryview] = []
    checksums: list[str] = []
    forms: dict[str, int] = {}
    form_of_layer: list[str] = []
    for number, layer in enumerate(packed.layers):
        form = json.dumps(
            [layer.codec, _describe(number, "keys", layer.key_form), _describe(number, "values", layer.value_form)],
            separators=(",", ":"),
        )
        form_of_layer.append(str(forms.setdefault(form, len(forms))))
        checksum = xxhash.xxh3_64()
        for part, tensor in layer.parts.items():
            view = _bytes_of(tensor)
            checksum.update(view)
            describe(f"layer.{number}.{part}", DTYPE_NAMES[tensor.dtype], list(tensor.shape), view.nbytes)
            payload.append(view)
        checksums.append(checksum.hexdigest())
    tensors["__metadata__"] = {
        "format": FORMAT,
        "key": key,
        "start": str(kv.start),
        "checksums": ",".join(checksums),
        "forms": f"[{','.join(forms)}]",
        "layers": ",".join(form_of_layer),
    }
    if kv.context:
        tensors["__metadata__"][CONTEXT] = kv.context
    header = json.dumps(tensors, separators=(",", ":")).encode("ascii")
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header + tokens
    digest = digest_of(head)
    return EncodedChunk([memoryview(head + digest), *payload], digest, 8 + len(header) + place)


def _describe(number: int, what: str, form: TensorForm) -> dict[str, Any]:
    if form.dtype not in DTYPE_NAMES:
        raise StoreError(
            f"layer {number} has {what} of {form.dtype}; the store keeps {', '.join(map(str, DTYPE_NAMES))}"
        )
    return {"dtype": DTYPE_NAMES[form.dtype], "shape": form.shape}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
