"""The cache of a blended prompt."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from cacheblend_rag.model import KVCache

__all__ = ["BlendCache", "Scatterer"]


class Scatterer(Protocol):
    """What takes fresh KV in the cache's place while a prompt is prefilled: a `Steering`."""

    def scatter(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge freshly computed rows into a layer's KV and return the layer's KV for the whole prompt."""


class BlendCache(KVCache):
    """The cache of one prompt: `steering` guides its prefill, and afterwards it is an ordinary cache."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.steering: Scatterer | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store fresh KV and return all of the layer."""
        if self.steering is not None:
            return self.steering.scatter(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)
