"""The KV of one chunk, as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["ChunkKV", "LayerKV", "in_float16"]


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
    sensitivity : tuple of float or None
        How much each token's KV changes behind other chunks, as measured when the chunk was added; None where it was not.
    context : str
        Digest of the tokens that it was encoded behind, beside the encoding prefix (`cacheblend_rag.keys`); empty where alone.
    """

    token_ids: tuple[int, ...]
    start: int
    layers: Sequence[LayerKV]
    sensitivity: tuple[float, ...] | None = None
    context: str = ""

    @property
    def nbytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)

    def measured(self, sensitivity: Sequence[float]) -> ChunkKV:
        """Return the same KV with a sensitivity for each token, as exact as every tier keeps it (float16)."""
        return replace(self, sensitivity=tuple(in_float16(sensitivity).tolist()))


def in_float16(numbers: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float16]]:
    """Return numbers in little-endian float16; what is beyond its range becomes the largest that it has."""
    largest = float(np.finfo(np.float16).max)
    return np.clip(np.asarray(numbers, dtype=np.float64), -largest, largest).astype("<f2")
