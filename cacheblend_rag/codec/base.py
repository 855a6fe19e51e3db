"""Packed KV: what a codec makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from cacheblend_rag.kv import LayerKV

__all__ = ["Codec", "PackedKV", "PackedLayer", "TensorForm", "main_codec"]


class TensorForm(NamedTuple):
    """What a tensor looks like once it is unpacked."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the unpacked tensor in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One layer of a chunk's KV, as a codec packed it.

    Attributes
    ----------
    codec : str
        The codec that unpacks it; "native" where the codec that was asked for could not represent the layer.
    key_form, value_form : TensorForm
        What they are unpacked to: the shapes and dtypes that were packed.
    parts : mapping of str to Tensor
        The packed tensors by name, contiguous, in the order in which they are stored.
    """

    codec: str
    key_form: TensorForm
    value_form: TensorForm
    parts: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Size of all parts in bytes."""
        return sum(part.nbytes for part in self.parts.values())


@dataclass(frozen=True, slots=True, eq=False)
class PackedKV:
    """The KV of one chunk, packed layer by layer; see `cacheblend_rag.kv.ChunkKV`.

    Attributes
    ----------
    token_ids : tuple of int
        The chunk's tokens.
    start : int
        The position of its first token when it was encoded.
    layers : sequence of PackedLayer
        One for each decoder layer.
    context : str
        Digest of the tokens that it was encoded behind, beside the encoding prefix (`cacheblend_rag.keys`); empty where alone.
    """

    token_ids: tuple[int, ...]
    start: int
    layers: Sequence[PackedLayer]
    context: str = ""

    @property
    def nbytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def codec(self) -> str:
        """The codec of its layers, of most of them if not all are alike."""
        return main_codec([layer.codec for layer in self.layers])


def main_codec(codecs: Sequence[str]) -> str:
    """Return which codec most layers have; "native" where there are none."""
    return max(sorted(set(codecs)), key=codecs.count, default="native")


class Codec(Protocol):
    """A way to represent a layer's KV in fewer bytes.

    What a codec cannot represent (numbers that are not finite, or beyond its range) it keeps native. So packing never fails
    and never makes a finite number infinite.
    """

    @property
    def name(self) -> str:
        """The name under which settings and stored bytes know it."""

    def pack(self, layer: LayerKV) -> PackedLayer:
        """Pack one layer, ``(num_kv_heads, seq_len, head_dim)``; the result may share memory with it."""

    def unpack(self, packed: PackedLayer) -> LayerKV:
        """Return what was packed, in the dtypes it had; the result may share memory with the parts."""
