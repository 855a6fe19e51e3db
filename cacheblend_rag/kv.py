"""The KV of one chunk, as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

__all__ = ["KV", "ChunkKV", "LayerKV"]


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
    # Digest of the tokens that it was encoded after, beside the preamble (`cacheblend_rag.keys`); empty where there are
    # none.
    context: str = ""

    @property
    def nbytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)


class ChunkKV(KV[LayerKV]):
    """KV as plain tensors: layers of ``(num_kv_heads, seq_len, head_dim)``, on the CPU, contiguous."""

    __slots__ = ()
