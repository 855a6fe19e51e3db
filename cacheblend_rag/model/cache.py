"""A KV cache that keeps every token of every layer and grows in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicLayer

from cacheblend_rag.kv import LayerKV

__all__ = ["KVCache", "KVCacheLayer"]


class KVCacheLayer(DynamicLayer):
    """One layer's KV, ``(batch, num_kv_heads, seq_len, head_dim)``, in a buffer with room behind it.

    transformers' own dynamic layer copies everything for each new token; this one writes the token into the buffer.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffer: LayerKV | None = None

    def hold(self, buffer: LayerKV, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Take over `buffer`, whose first `length` tokens are filled, and return their keys and values."""
        self.dtype, self.device = buffer.keys.dtype, buffer.keys.device
        self.is_initialized = True
        self._buffer = buffer
        self.keys = buffer.keys[:, :, :length]
        self.values = buffer.values[:, :, :length]
        return self.keys, self.values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens and return the whole layer."""
        length = self.get_seq_length()
        if length == 0:
            return self.hold(LayerKV(key_states, value_states), key_states.shape[2])
        end = length + key_states.shape[2]
        buffer = self._room_for(end)
        buffer.keys[:, :, length:end] = key_states
        buffer.values[:, :, length:end] = value_states
        return self.hold(buffer, end)

    def _room_for(self, end: int) -> LayerKV:
        assert self._buffer is not None and self.keys is not None and self.values is not None
        # Beam reordering and batch selection replace `keys`; the buffer is then no longer what the layer holds.
        if self._buffer.keys.data_ptr() == self.keys.data_ptr() and self._buffer.keys.shape[2] >= end:
            return self._buffer
        grown = []
        for tensor in (self.keys, self.values):
            room = tensor.new_empty(*tensor.shape[:2], end + max(64, end // 8), tensor.shape[3])
            room[:, :, : tensor.shape[2]] = tensor
            grown.append(room)
        return LayerKV(*grown)


class KVCache(Cache):
    """A cache of `KVCacheLayer` objects.

    Sliding-window layers are kept whole: transformers' default cache would keep their window only, and a chunk's KV is
    needed beyond the window of the prompt it was encoded in.
    """

    def __init__(self, num_layers: int) -> None:
        self.kv_layers = [KVCacheLayer() for _ in range(num_layers)]
        super().__init__(layers=[*self.kv_layers])

    @classmethod
    def behind(cls, prefix: Sequence[LayerKV], batch: int, length: int) -> KVCache:
        """Return a cache of `batch` rows that all begin with the same tokens.

        Parameters
        ----------
        prefix : sequence of LayerKV
            Those tokens' KV, ``(1, num_kv_heads, prefix_len, head_dim)`` for each layer.
        batch : int
            Rows.
        length : int
            Tokens for which there is room in each row, the prefix included.
        """
        cache = cls(len(prefix))
        for layer, kept in zip(cache.kv_layers, prefix, strict=True):
            buffers = []
            for tensor in kept:
                _, heads, count, width = tensor.shape
                buffer = tensor.new_empty(batch, heads, length, width)
                buffer[:, :, :count] = tensor
                buffers.append(buffer)
            layer.hold(LayerKV(*buffers), kept.keys.shape[2])
        return cache

    def kv(self) -> list[LayerKV]:
        """Return the KV of every layer, ``(batch, num_kv_heads, seq_len, head_dim)`` each; all must hold some."""
        held = []
        for layer in self.kv_layers:
            assert layer.keys is not None and layer.values is not None
            held.append(LayerKV(layer.keys, layer.values))
        return held
