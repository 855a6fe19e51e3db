"""Reading one chunk's stored bytes, in the form of `cacheblend_rag.store.chunkformat`, from wherever they are."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from cacheblend_rag.codec import EXACT, PackedLayer, TensorForm, codec_names, main_codec, unpack_layer
from cacheblend_rag.errors import ChunkReadError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.store.chunkformat import (
    CONTEXT,
    DIGEST_BYTES,
    DTYPES,
    FORMAT,
    FORMAT_WITHOUT_CODECS,
    digest_of,
    unpack_tokens,
)
from cacheblend_rag.store.source import ByteSource, FileSource

__all__ = ["ChunkFile"]

# One read fetches the whole head of a quantised chunk of about a thousand tokens in fifty layers; longer heads take a second.
_HEAD_GUESS_BYTES = 32 * 1024


class ChunkFile:
    """Reads one chunk's stored bytes layer by layer.

    Parameters
    ----------
    source : ByteSource
        The bytes.
    key : str
        The store key they must carry.

    Attributes
    ----------
    key : str
        The store key.
    tier : str
        Where the bytes are.
    digest : bytes
        The header digest, which tells this file from any other.
    file_bytes, packed_bytes, kv_bytes : int
        Size of the file, of its layers as they are stored, and of the KV that they are unpacked to.

    Raises
    ------
    ChunkReadError
        If the head is damaged, the file is cut short, or it belongs to another key.
    """

    def __init__(self, source: ByteSource, key: str) -> None:
        self._source = source
        self.tier = source.tier
        self.key = key
        self._read_head()

    @classmethod
    def open(cls, path: str | Path, key: str) -> ChunkFile:
        """Open a file on disk; it stays readable when it is unlinked.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ChunkReadError
            If it cannot be read or is not sound.
        """
        try:
            source = FileSource(str(path))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ChunkReadError(key, f"file {path}: {error.strerror}") from error
        return cls(source, key)

    @property
    def codec(self) -> str:
        """How its layers are packed, most of them if not all alike."""
        return main_codec(self.codecs)

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codec of each layer."""
        return tuple(layer.codec for layer in self._layers)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the KV was computed from."""
        return self._token_ids

    @property
    def start(self) -> int:
        """The position that the keys of its first token are rotated to."""
        return self._start

    @property
    def context(self) -> str:
        """Digest of the tokens that it was computed behind, beside the encoding prefix; empty where alone."""
        return self._context

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self._checksums)

    def layer(self, index: int) -> LayerKV:
        """Read one layer in one piece, verify it and unpack it.

        Raises
        ------
        ChunkReadError
            If the bytes are gone, or do not match their checksum.
        """
        return unpack_layer(self.packed_layer(index))

    def packed_layer(self, index: int) -> PackedLayer:
        """Read one layer in one piece and verify it; its parts stay packed.

        Raises
        ------
        ChunkReadError
            If the bytes are gone, or do not match their checksum.
        """
        layer = self._layers[index]
        begin, nbytes = layer.begin, layer.nbytes
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        view = buffer.numpy().data
        count = self._read(view, self._body + begin)
        if count < nbytes:
            raise ChunkReadError(self.key, f"layer {index} ends after {count} of {nbytes} bytes")
        if xxhash.xxh3_64_hexdigest(view) != self._checksums[index]:
            raise ChunkReadError(self.key, f"layer {index} does not match its checksum")
        parts = {
            name: _cut(buffer, tensor["data_offsets"][0] - begin, tensor) for name, tensor in layer.tensors.items()
        }
        return PackedLayer(layer.codec, layer.key_form, layer.value_form, parts)

    def verify(self) -> None:
        """Read every layer.

        Raises
        ------
        ChunkReadError
            If one of them is damaged.
        """
        for index in range(self.num_layers):
            self.packed_layer(index)

    def _read_head(self) -> None:
        size = self._source.size
        data = self._read_exactly(0, min(size, _HEAD_GUESS_BYTES))
        length = int.from_bytes(data[:8], "little")
        # The digest tells whether this length, and everything behind it, is what was written; until then it is only a guess.
        if len(data) < 8 or length > size - 8:
            raise ChunkReadError(self.key, f"the file's {size} bytes do not hold its header")
        body = 8 + length
        if len(data) < body:
            data += self._read_exactly(len(data), body)
        try:
            header = json.loads(data[8:body])
            tokens_end = body + int(header["token_ids"]["data_offsets"][1])
            head_end = tokens_end + DIGEST_BYTES
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
            raise ChunkReadError(self.key, "its header is damaged") from error
        if not body <= tokens_end <= size:
            raise ChunkReadError(self.key, "its header is damaged")
        if len(data) < head_end:
            data += self._read_exactly(len(data), head_end)
        self.digest = data[tokens_end:head_end]
        if self.digest != digest_of(data[:tokens_end]):
            raise ChunkReadError(self.key, "its header does not match its digest")
        self._parse(header, body)
        self._token_ids = unpack_tokens(data[body:tokens_end])
        if size != self.file_bytes:
            raise ChunkReadError(self.key, f"the file has {size} bytes where {self.file_bytes} were written")

    def _parse(self, header: dict[str, Any], body: int) -> None:
        # The digest matched: from here on the header is what some version of this library wrote.
        metadata = header["__metadata__"]
        if metadata["format"] not in (FORMAT, FORMAT_WITHOUT_CODECS):
            raise ChunkReadError(
                self.key, f"it is in the format {metadata['format']!r}, this version reads up to {FORMAT!r}"
            )
        if metadata["key"] != self.key:
            raise ChunkReadError(self.key, f"the file belongs to key {metadata['key'][:12]}…")
        self._start = int(metadata["start"])
        self._context = str(metadata.get(CONTEXT, ""))
        self._checksums = metadata["checksums"].split(",") if metadata["checksums"] else []
        self._body = body
        self._layers = _layers(header, len(self._checksums), metadata)
        unknown = {layer.codec for layer in self._layers} - {*codec_names(), EXACT.name}
        if unknown:
            raise ChunkReadError(
                self.key, f"it is packed by the codec {min(unknown)!r}; this version knows {', '.join(codec_names())}"
            )
        self.packed_bytes = sum(layer.nbytes for layer in self._layers)
        self.kv_bytes = sum(layer.key_form.nbytes + layer.value_form.nbytes for layer in self._layers)
        self.file_bytes = body + int(header["header_digest"]["data_offsets"][1]) + self.packed_bytes

    def _read_exactly(self, begin: int, end: int) -> bytes:
        data = bytearray(end - begin)
        count = self._read(memoryview(data), begin)
        if count != len(data):
            raise ChunkReadError(self.key, f"the file ends at byte {begin + count} inside its header")
        return bytes(data)

    def _read(self, view: memoryview, offset: int) -> int:
        try:
            return self._source.read_into(view, offset)
        except OSError as error:
            raise ChunkReadError(self.key, f"its bytes cannot be read: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class _StoredLayer:
    """Where one layer's parts lie, and what they are unpacked to."""

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
    tensors: list[dict[str, dict[str, Any]]] = [{} for _ in range(count)]
    for name, tensor in header.items():
        if name.startswith("layer."):
            _, number, part = name.split(".", 2)
            tensors[int(number)][part] = tensor
    if metadata["format"] == FORMAT_WITHOUT_CODECS:
        return [_StoredLayer("native", _form(each["keys"]), _form(each["values"]), each) for each in tensors]
    forms = [(codec, _form(keys), _form(values)) for codec, keys, values in json.loads(metadata["forms"])]
    chosen = [forms[int(number)] for number in metadata["layers"].split(",")] if metadata["layers"] else []
    return [_StoredLayer(*form, each) for form, each in zip(chosen, tensors, strict=True)]


def _form(described: dict[str, Any]) -> TensorForm:
    return TensorForm(tuple(described["shape"]), DTYPES[described["dtype"]])


def _cut(buffer: torch.Tensor, offset: int, tensor: dict[str, Any]) -> torch.Tensor:
    dtype, shape = DTYPES[tensor["dtype"]], tensor["shape"]
    piece = buffer[offset : offset + math.prod(shape) * dtype.itemsize]
    if offset % dtype.itemsize:
        # Where parts differ in type: a view must begin at a multiple of its item size.
        piece = piece.clone()
    return piece.view(dtype).view(shape)
