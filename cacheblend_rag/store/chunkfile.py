"""The form of the bytes of one chunk's KV: a safetensors file, layer by layer, every byte of it under a checksum.

Layout, in file order::

    8 bytes           length of the header
    header            JSON: the tensors' types, shapes and places, and ``__metadata__`` with the format, the store key,
                      the start position, one checksum (xxh3, 64 bits) a layer, how each layer is unpacked, and, where the
                      chunk was read behind others, the digest of their tokens
    token_ids         int32
    header_digest     16 bytes, blake2b of everything before it
    layer.0.keys, layer.0.values, layer.1.keys, ...

A layer's tensors are the parts that its codec makes of it (`cacheblend_rag.codec`): ``keys`` and ``values`` where it stays
in floating point, ``keys.grid``, ``values.grid``, ``keys.codes`` and ``values.codes`` where it is quantised. Metadata ``forms``
lists what layers are unpacked to, each as [codec, keys, values] with types and shapes; ``layers`` says which of them each
layer has.

Any safetensors reader can open it. The digest covers the checksums and these the layers: the head and a layer prove the layer.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from cacheblend_rag.codec import (
    EXACT,
    PackedKV,
    PackedLayer,
    TensorForm,
    codec_names,
    main_codec,
    make_codec,
    pack_kv,
)
from cacheblend_rag.errors import ChunkReadError, RemoteUnavailableError, StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.memory import KVReader

__all__ = ["ByteSource", "ChunkFile", "EncodedChunk", "FileSource", "encode_chunk", "pack_tokens", "unpack_tokens"]

# What keeps this process from reading now, and says nothing of the bytes.
_PASSING = {
    errno.EACCES,
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EPERM,
    errno.ESTALE,
    errno.ETIMEDOUT,
}

_FORMAT = "cacheblend-rag chunk kv 2"
_DIGEST_BYTES = 16
# One read fetches the whole head of a quantised chunk of about a thousand tokens in fifty layers; longer heads take a second.
_HEAD_GUESS_BYTES = 32 * 1024
# Many times what any model's take; what a file says beyond is not even read.
_LONGEST_HEADER_BYTES = 512 * 1024
_MOST_TOKENS = 2 * 1024**2
# Of 4 bits a number, float64.
_MOST_UNPACKED = 16

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


def pack_tokens(token_ids: tuple[int, ...]) -> bytes:
    """Return token ids as little-endian 32 bit integers; StoreError if one does not fit."""
    if any(not 0 <= token < 2**31 for token in token_ids):
        raise StoreError("token ids must be from 0 to 2**31 - 1 to be stored")
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Return the token ids that `pack_tokens` packed."""
    return tuple(np.frombuffer(data, dtype="<i4").tolist())


def _digest_of(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk's file, not yet written: its bytes in order, its size, and the head that they begin with, which has its digest."""

    buffers: Iterable[memoryview]
    head: bytes
    nbytes: int


def encode_chunk(key: str, kv: ChunkKV | PackedKV) -> EncodedChunk:
    """Lay out the file of one chunk, with its key; StoreError if a tensor is of a type that the format does not know."""
    tokens = pack_tokens(kv.token_ids)
    packed = pack_kv(kv, make_codec("native")) if isinstance(kv, ChunkKV) else kv
    tensors: dict[str, Any] = {}
    place = 0

    def describe(name: str, dtype: str, shape: list[int], nbytes: int) -> None:
        nonlocal place
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + nbytes]}
        place += nbytes

    describe("token_ids", "I32", [len(kv.token_ids)], len(tokens))
    describe("header_digest", "U8", [_DIGEST_BYTES], _DIGEST_BYTES)
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
            view = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
            checksum.update(view)
            describe(f"layer.{number}.{part}", _DTYPE_NAMES[tensor.dtype], list(tensor.shape), view.nbytes)
            payload.append(view)
        checksums.append(checksum.hexdigest())
    tensors["__metadata__"] = {
        "format": _FORMAT,
        "key": key,
        "start": str(kv.start),
        "checksums": ",".join(checksums),
        "forms": f"[{','.join(forms)}]",
        "layers": ",".join(form_of_layer),
    }
    if kv.context:
        tensors["__metadata__"]["context"] = kv.context
    header = json.dumps(tensors, separators=(",", ":")).encode("ascii")
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header + tokens
    head += _digest_of(head)
    return EncodedChunk([memoryview(head), *payload], head, 8 + len(header) + place)


def _describe(number: int, what: str, form: TensorForm) -> dict[str, Any]:
    if form.dtype not in _DTYPE_NAMES:
        raise StoreError(
            f"layer {number} has {what} of {form.dtype}; the store keeps {', '.join(map(str, _DTYPE_NAMES))}"
        )
    return {"dtype": _DTYPE_NAMES[form.dtype], "shape": form.shape}


class ByteSource(Protocol):
    """The bytes of one stored chunk; they may be read from any thread, and never change."""

    @property
    def tier(self) -> str:
        """Where they are: "disk", or the scheme of a remote tier's URL."""

    @property
    def size(self) -> int:
        """How many bytes there are."""

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` with the bytes from `offset` on, or as many as there are; return how many. OSError if that fails."""


class FileSource:
    """A file, which stays readable when it is unlinked."""

    def __init__(self, path: str, tier: str = "disk") -> None:
        self.tier = tier
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # An argument, because the module's names may be gone when the interpreter ends.
        if self._fd >= 0:
            close(self._fd)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` with the bytes from `offset` on; return how many there were, fewer only where the file ends."""
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done


class ChunkFile(KVReader):
    """Reads one chunk's stored bytes layer by layer; ChunkReadError if they are damaged, cut short, or another key's."""

    def __init__(self, source: ByteSource, key: str) -> None:
        self._source = source
        self.tier = source.tier
        self.key = key
        self._read_head()

    @classmethod
    def open(cls, path: str | Path, key: str) -> ChunkFile:
        """Open a file on disk, which stays readable when it is unlinked."""
        try:
            source = FileSource(str(path))
        except OSError as error:
            raise ChunkReadError(key, f"file {path}: {error.strerror}", damaged=error.errno not in _PASSING) from error
        return cls(source, key)

    def packed_layer(self, index: int) -> PackedLayer:
        """Read one layer in one piece and verify it; its parts stay packed."""
        layer = self._layers[index]
        begin, nbytes = layer.begin, layer.nbytes
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        view = buffer.numpy().data
        self._read_all(view, self._body + begin, f"layer {index} ends too early")
        if xxhash.xxh3_64_hexdigest(view) != self._checksums[index]:
            raise ChunkReadError(self.key, f"layer {index} does not match its checksum")
        parts = {
            name: _cut(buffer, tensor["data_offsets"][0] - begin, tensor) for name, tensor in layer.tensors.items()
        }
        return PackedLayer(layer.codec, layer.key_form, layer.value_form, parts)

    def verify(self) -> None:
        for index in range(self.num_layers):
            self.packed_layer(index)

    def _read_head(self) -> None:
        size = self._source.size
        data = self._read_exactly(0, min(size, _HEAD_GUESS_BYTES))
        length = int.from_bytes(data[:8], "little")
        # The digest tells whether this length, and everything after it, is what was written; until then it is only a guess.
        if len(data) < 8 or length > min(size - 8, _LONGEST_HEADER_BYTES):
            raise ChunkReadError(self.key, f"the file's {size} bytes are too few for its header, or that is too long")
        body = 8 + length
        if len(data) < body:
            data += self._read_exactly(len(data), body)
        try:
            header = json.loads(data[8:body])
            tokens_end = body + int(header["token_ids"]["data_offsets"][1])
            head_end = tokens_end + _DIGEST_BYTES
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
            raise ChunkReadError(self.key, "its header is damaged") from error
        if not body <= tokens_end <= min(size, body + 4 * _MOST_TOKENS):
            raise ChunkReadError(self.key, "its header is damaged")
        if len(data) < head_end:
            data += self._read_exactly(len(data), head_end)
        if data[tokens_end:head_end] != _digest_of(data[:tokens_end]):
            raise ChunkReadError(self.key, "its header does not match its digest")
        try:
            self._parse(header, body, unpack_tokens(data[body:tokens_end]))
        # Its digest is right: it was written so.
        except (LookupError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ChunkReadError(self.key, "its header is damaged") from error
        if size != self.file_bytes:
            raise ChunkReadError(self.key, f"the file has {size} bytes, but {self.file_bytes} were written")

    def _parse(self, header: dict[str, Any], body: int, token_ids: tuple[int, ...]) -> None:
        metadata = header["__metadata__"]
        if metadata["format"] != _FORMAT:
            raise ChunkReadError(
                self.key,
                f"it is in the format {metadata['format']!r:.80}; this version reads {_FORMAT!r}",
                damaged=False,
            )
        if metadata["key"] != self.key:
            raise ChunkReadError(self.key, f"the file belongs to key {metadata['key']!s:.12}…")
        self._checksums = metadata["checksums"].split(",") if metadata["checksums"] else []
        self._body = body
        self._layers = layers = _layers(header, len(self._checksums), metadata)
        self.codecs = tuple(layer.codec for layer in layers)
        unknown = {*self.codecs} - {*codec_names(), EXACT.name}
        if unknown:
            raise ChunkReadError(
                self.key,
                f"it is packed by the codec {min(unknown)!r:.80}; this version knows {', '.join(codec_names())}",
                damaged=False,
            )
        packed_bytes = sum(layer.nbytes for layer in layers)
        self.kv_bytes = sum(layer.key_form.nbytes + layer.value_form.nbytes for layer in layers)
        self.file_bytes = body + int(header["header_digest"]["data_offsets"][1]) + packed_bytes
        start, context = int(metadata["start"]), str(metadata.get("context", ""))
        super().__init__(token_ids, start, context, len(layers), main_codec(self.codecs), packed_bytes)

    def _read_exactly(self, begin: int, end: int) -> bytes:
        data = bytearray(end - begin)
        self._read_all(memoryview(data), begin, "the file ends inside its header")
        return bytes(data)

    def _read_all(self, view: memoryview, offset: int, otherwise: str) -> None:
        try:
            count = self._source.read_into(view, offset)
        except OSError as error:
            passes = isinstance(error, RemoteUnavailableError) or error.errno in _PASSING
            reason = f"its bytes cannot be read: {error.strerror or error}"
            raise ChunkReadError(self.key, reason, damaged=not passes) from error
        if count < len(view):
            raise ChunkReadError(self.key, f"{otherwise}, at byte {offset + count}")


@dataclass(frozen=True, slots=True)
class _StoredLayer:
    """Where one layer's parts lie, one after the other, and what they are unpacked to."""

    codec: str
    key_form: TensorForm
    value_form: TensorForm
    tensors: dict[str, dict[str, Any]]

    @property
    def begin(self) -> int:
        return min(int(tensor["data_offsets"][0]) for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        return max(int(tensor["data_offsets"][1]) for tensor in self.tensors.values()) - self.begin


def _layers(header: dict[str, Any], count: int, metadata: dict[str, str]) -> list[_StoredLayer]:
    """Return the layers; ValueError unless they fill the file one after the other, so that all of them take what it has."""
    tensors: list[dict[str, dict[str, Any]]] = [{} for _ in range(count)]
    tokens, digest = header["token_ids"], header["header_digest"]
    begin = 4 * tokens["shape"][0]
    place, last = begin + _DIGEST_BYTES, 0
    if tokens["data_offsets"] != [0, begin] or digest["data_offsets"] != [begin, place]:
        raise ValueError("the layers begin elsewhere")
    for name, tensor in header.items():
        if name.startswith("layer."):
            _, number, part = name.split(".", 2)
            layer, (begin, end) = int(number), tensor["data_offsets"]
            if type(begin) is not int or begin != place or not last <= layer <= last + 1:
                raise ValueError("a tensor lies elsewhere")
            if type(end) is not int or end - begin != _form(tensor).nbytes:
                raise ValueError("a tensor has another size than its shape")
            place, last = end, layer
            tensors[layer][part] = tensor
    forms = [(codec, _form(keys), _form(values)) for codec, keys, values in json.loads(metadata["forms"])]
    chosen = [forms[int(number)] for number in metadata["layers"].split(",")] if metadata["layers"] else []
    layers = [_StoredLayer(*form, each) for form, each in zip(chosen, tensors, strict=True)]
    rows = {length for layer in layers for form in (layer.key_form, layer.value_form) for length in form.shape[-2:-1]}
    if not rows <= {tokens["shape"][0]}:
        raise ValueError("a layer has other rows than tokens")
    if any(layer.key_form.nbytes + layer.value_form.nbytes > _MOST_UNPACKED * layer.nbytes for layer in layers):
        raise ValueError("a layer is unpacked to more than any codec packs")
    return layers


def _form(described: dict[str, Any]) -> TensorForm:
    shape = described["shape"]
    if type(shape) is not list or not all(type(length) is int and 0 <= length < 2**31 for length in shape):
        raise ValueError("no tensor has this shape")
    return TensorForm(tuple(shape), _DTYPES[described["dtype"]])


def _cut(buffer: torch.Tensor, offset: int, tensor: dict[str, Any]) -> torch.Tensor:
    dtype, shape = _DTYPES[tensor["dtype"]], tensor["shape"]
    piece = buffer[offset : offset + math.prod(shape) * dtype.itemsize]
    if offset % dtype.itemsize:
        # Where parts differ in type: a view must begin at a multiple of its item size.
        piece = piece.clone()
    return piece.view(dtype).view(shape)
