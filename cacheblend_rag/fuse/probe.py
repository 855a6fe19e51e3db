"""Running a layer only as far as its selection needs to see it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model import AttentionCall, KVCache, watch_attention

__all__ = ["ProbingCache"]


class _Probed(Exception):
    """Carries out of a layer's forward what its attention was about to be called with."""

    def __init__(self, kv: LayerKV, call: AttentionCall | None = None) -> None:
        super().__init__()
        self.kv = kv
        self.call = call


class ProbingCache(KVCache):
    """A cache that leaves the layer as soon as it has computed its keys and values, before its attention and MLP are paid for.

    Parameters
    ----------
    num_layers : int
        Decoder layers of the model.
    whole : callable, optional
        Makes of the computed rows' KV that of the whole prompt, which the layer's attention is to be called with; without it the
        layer is left before that.
    """

    def __init__(self, num_layers: int, whole: Callable[[LayerKV], LayerKV] | None) -> None:
        super().__init__(num_layers)
        self._whole = whole
        self._fresh: LayerKV | None = None

    def run(self, module: nn.Module, arguments: dict[str, Any]) -> tuple[LayerKV, AttentionCall | None] | None:
        """Run a layer until it can be left.

        Parameters
        ----------
        module : nn.Module
            The layer.
        arguments : dict
            What it is called with, by name; this is the cache among them.

        Returns
        -------
        tuple of (LayerKV, AttentionCall or None), or None
            Its fresh KV, and with `whole` what its attention was about to be called with; None if it handed no KV to the cache.
        """
        try:
            with nullcontext() if self._whole is None else watch_attention(self._leave, before=True):
                module.forward(**arguments)
        except _Probed as caught:
            return caught.kv, caught.call
        return None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Leave the layer with its fresh KV, or return the KV of the whole prompt for its attention."""
        self._fresh = LayerKV(key_states, value_states)
        if self._whole is None:
            raise _Probed(self._fresh)
        whole = self._whole(self._fresh)
        return whole.keys, whole.values

    def _leave(self, call: AttentionCall) -> None:
        """Leave the layer with what its attention is called with."""
        assert self._fresh is not None
        raise _Probed(self._fresh, call)
