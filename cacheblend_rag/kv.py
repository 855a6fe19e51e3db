"""The KV of one chunk, as plain tensors, and moving rotated keys to another position.

Rotary embeddings turn a key by an angle proportional to its position, so a key that was encoded at one position becomes
the key of another by turning it through the difference (CacheBlend, appendix A; Prompt Cache, section 4.2). Any scaling
that only changes the frequencies (linear, llama3, yarn) and any constant factor on the rotated vector leaves this true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import torch

__all__ = ["ChunkKV", "KV", "LayerKV", "Rotation", "RotationTable", "shift_layer"]


class LayerKV(NamedTuple):
    """Keys and values of one layer, ``(num_kv_heads, seq_len, head_dim)`` each unless said otherwise."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Size of both tensors in bytes."""
        return self.keys.nbytes + self.values.nbytes


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Layer = TypeVar("Layer", bound=_Sized, covariant=True)


@dataclass(frozen=True, slots=True, eq=False)
class KV(Generic[Layer]):
    """The KV of one chunk, encoded after the preamble and its context; one of `layers` for each decoder layer that has KV."""

    token_ids: tuple[int, ...]
    # The position of its first token when it was encoded; its keys are rotated accordingly.
    start: int
    layers: Sequence[Layer]
    # Digest of the tokens that it was encoded after, beside the preamble; empty where there are
    # none.
    context: str = ""

    @property
    def nbytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)


class ChunkKV(KV[LayerKV]):
    """KV as plain tensors: layers of ``(num_kv_heads, seq_len, head_dim)``, on the CPU, contiguous."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotation of one layer's keys."""

    # Angle per position of each pair of dimensions, float32, ``(rotary_dim / 2,)``; negative where a model turns the other
    # way.
    inv_freq: torch.Tensor
    # Whether dimension i is paired with i + rotary_dim / 2, or 2 i with 2 i + 1. Dimensions from rotary_dim on are not
    # rotated.
    layout: Literal["half", "interleaved"]
    # Which of the two tensors that the layer hands to its cache is rotated. Latent attention (DeepSeek) hands over the
    # latent as keys and the rotary part of the keys as values.
    part: Literal["keys", "values"] = "keys"

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of a head that are rotated."""
        return 2 * self.inv_freq.numel()

    def table(self, distances: torch.Tensor, device: torch.device) -> RotationTable:
        """Return cosines and sines for moving tokens by `distances` positions, new minus old, integer, ``(seq_len,)``."""
        # Tokens of a chunk move equally far.
        different, counts = torch.unique_consecutive(distances, return_counts=True)
        # float64 keeps the angle of a far position as exact as the frequency itself.
        angles = different.to(torch.float64)[:, None] * self.inv_freq.to(torch.float64).cpu()[None, :]
        cos, sin = (each.float().repeat_interleave(counts, 0).to(device) for each in (angles.cos(), angles.sin()))
        return RotationTable(cos, sin, self.layout, self.part)


@dataclass(frozen=True, eq=False)
class RotationTable:
    """Cosines and sines, float32, ``(seq_len, rotary_dim / 2)`` each, and the layout and the part of the KV they are for."""

    cos: torch.Tensor
    sin: torch.Tensor
    layout: Literal["half", "interleaved"]
    part: Literal["keys", "values"]


def shift_layer(kv: LayerKV, table: RotationTable) -> None:
    """Turn a layer's KV, ``(..., seq_len, head_dim)``, in place to the positions of `table`, in float32, rounded once."""
    keys = kv.values if table.part == "values" else kv.keys
    half = table.cos.shape[-1]
    if table.layout == "half":
        first, second = keys[..., :half], keys[..., half : 2 * half]
    else:
        first, second = keys[..., 0 : 2 * half : 2], keys[..., 1 : 2 * half : 2]
    turned = (first * table.cos).addcmul_(second, table.sin, value=-1)
    second.copy_((second * table.cos).addcmul_(first, table.sin))
    first.copy_(turned)
