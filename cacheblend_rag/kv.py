"""The KV of one chunk, as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["ChunkKV", "LayerKV"]


class LayerKV(NamedTuple):
    """Keys and values of one layer, ``(num_kv_heads, seq_len, head_dim)`` each unless said otherwise."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Size of both tensors in bytes."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class ChunkKV:
    """The KV of one chunk, encoded behind the encoding prefix and its context.

    Attributes
    ----------
    token_ids : tuple of int
        The chunk's tokens.
    start : int
        The position of its first token when it was encoded; its keys are rotated accordingly.
    layers : sequence of LayerKV
        One for each decoder layer, ``(num_kv_heads, seq_len, head_dim)``, on the CPU, contiguous. Shapes may differ
        from layer to layer; seq_len is the number of tokens everywhere.
    context : str
        Digest of the tokens that it was encoded behind, beside the encoding prefix (`cacheblend_rag.keys`); empty where alone.
    """

    token_ids: tuple[int, ...]
    start: int
    layers: Sequence[LayerKV]
    context: str = ""

    @property
    def nbytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)
