"""KV as it is, or in a narrower floating-point type."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from cacheblend_rag.codec.base import PackedLayer, TensorForm
from cacheblend_rag.kv import LayerKV

__all__ = ["CastCodec", "ExactCodec", "NativeCodec", "form_of", "keep_native"]


def form_of(tensor: torch.Tensor) -> TensorForm:
    """Return the form of a tensor."""
    return TensorForm(tuple(tensor.shape), tensor.dtype)


def keep_native(layer: LayerKV) -> PackedLayer:
    """Return a layer with its tensors as they are."""
    parts = {"keys": layer.keys.contiguous(), "values": layer.values.contiguous()}
    return PackedLayer("native", form_of(layer.keys), form_of(layer.values), parts)


@dataclass(frozen=True, slots=True)
class NativeCodec:
    """KV in the dtype that the model computed it in."""

    name: str = "native"

    def pack(self, layer: LayerKV) -> PackedLayer:
        """Keep one layer as it is."""
        return keep_native(layer)

    def unpack(self, packed: PackedLayer) -> LayerKV:
        """Return what was packed."""
        return LayerKV(packed.parts["keys"], packed.parts["values"])


@dataclass(frozen=True, slots=True)
class ExactCodec(NativeCodec):
    """KV as it is in every tier, whatever codec a tier keeps chunks in: what was packed so is never packed otherwise."""

    name: str = "exact"

    def pack(self, layer: LayerKV) -> PackedLayer:
        """Keep one layer as it is."""
        return replace(keep_native(layer), codec=self.name)


@dataclass(frozen=True, slots=True)
class CastCodec:
    """KV in a narrower floating-point type.

    A layer is kept native where the type is no narrower than its own, and where a number would not be finite in it: float16
    ends at 65504.

    Attributes
    ----------
    name : str
        The codec's name.
    dtype : torch.dtype
        The narrower type.
    """

    name: str
    dtype: torch.dtype

    def pack(self, layer: LayerKV) -> PackedLayer:
        """Cast one layer."""
        if any(not t.is_floating_point() or t.dtype.itemsize <= self.dtype.itemsize for t in layer):
            return keep_native(layer)
        cast = LayerKV(*(tensor.to(self.dtype).contiguous() for tensor in layer))
        if not all(bool(tensor.isfinite().all()) for tensor in cast):
            return keep_native(layer)
        parts = {"keys": cast.keys, "values": cast.values}
        return PackedLayer(self.name, form_of(layer.keys), form_of(layer.values), parts)

    def unpack(self, packed: PackedLayer) -> LayerKV:
        """Cast one layer back."""
        return LayerKV(
            packed.parts["keys"].to(packed.key_form.dtype), packed.parts["values"].to(packed.value_form.dtype)
        )
