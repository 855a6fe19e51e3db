"""Packed KV, and the codec that keeps it as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from cacheblend_rag.kv import KV, LayerKV

__all__ = ["NATIVE", "Codec", "NativeCodec", "PackedKV", "PackedLayer", "TensorForm", "main_codec"]


class TensorForm(NamedTuple):
    """Shape and dtype of a tensor once it is unpacked."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the unpacked tensor in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One layer of a chunk's KV, as a codec packed it: the tensors by name, contiguous, in the order in which they are stored."""

    codec: str
    key_form: TensorForm
    value_form: TensorForm
    parts: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, codec: str, layer: LayerKV, parts: Mapping[str, torch.Tensor]) -> PackedLayer:
        """Return a layer that `codec` has packed into `parts`."""
        key_form, value_form = (TensorForm(tuple(tensor.shape), tensor.dtype) for tensor in layer)
        return cls(codec, key_form, value_form, parts)

    @property
    def nbytes(self) -> int:
        """Size of all parts in bytes."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def kv_bytes(self) -> int:
        """Size of the unpacked layer in bytes."""
        return self.key_form.nbytes + self.value_form.nbytes


class PackedKV(KV[PackedLayer]):
    """The KV of one chunk, packed layer by layer."""

    __slots__ = ()


def main_codec(codecs: Sequence[str]) -> str:
    """Return which codec most layers have; "native" where there are none."""
    return max(sorted(set(codecs)), key=codecs.count, default="native")


class Codec(Protocol):
    """A way to represent a layer's KV in fewer bytes."""

    @property
    def name(self) -> str:
        """The name under which settings and stored bytes know it."""

    def pack(self, layer: LayerKV) -> PackedLayer:
        """Pack one layer, ``(num_kv_heads, seq_len, head_dim)``; the result may share memory with it."""

    def unpack(self, packed: PackedLayer) -> LayerKV:
        """Return what was packed, in the dtypes it had; the result may share memory with the parts."""


@dataclass(frozen=True, slots=True)
class NativeCodec:
    """KV in the dtype that the model computed it in."""

    name: str

    def pack(self, layer: LayerKV) -> PackedLayer:
        parts = {"keys": layer.keys.contiguous(), "values": layer.values.contiguous()}
        return PackedLayer.of(self.name, layer, parts)

    def unpack(self, packed: PackedLayer) -> LayerKV:
        return LayerKV(packed.parts["keys"], packed.parts["values"])


NATIVE = NativeCodec("native")
"""Keeps what another codec cannot represent."""
