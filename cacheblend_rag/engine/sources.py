"""How much of its attention an answer pays to each token of the prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from cacheblend_rag.fuse import BlendCache
from cacheblend_rag.layout import ChunkSpan
from cacheblend_rag.model import AttentionCall, attention_weights, uncompiled, watch_attention

__all__ = ["SourceAttention"]


class SourceAttention:
    """Watches the rows behind which the tokens of an answer are written: the prompt's last row, and then each new token's.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    layers : sequence of int
        The layers that are looked at.
    length : int
        Tokens of the prompt.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], length: int) -> None:
        self._model = model
        self._layers = tuple(layers)
        self._length = length
        self._mass: dict[int, torch.Tensor] = {}
        self._steps = dict.fromkeys(self._layers, 0)
        self._seen = dict.fromkeys(self._layers, 0)

    @contextmanager
    def __call__(self, cache: BlendCache) -> Iterator[None]:
        """Watch a cache being filled and read for the duration of a ``with`` block, from the beginning."""
        self._mass.clear()
        self._steps = dict.fromkeys(self._layers, 0)
        self._seen = dict.fromkeys(self._layers, 0)

        def after_attention(call: AttentionCall) -> None:
            for layer in self._layers:
                if cache.kv_layers[layer].keys is call.key:
                    self._note(layer, call)
                    return

        with uncompiled(self._model), watch_attention(after_attention):
            yield

    def of(self, span: ChunkSpan) -> float:
        """Return the share of the answer's attention that went to a chunk, 0 to 1: the mean over its tokens, layers and heads."""
        shares = [
            float(self._mass[layer][span.start : span.stop].sum()) / self._steps[layer]
            for layer in self._layers
            if self._steps[layer]
        ]
        return sum(shares) / len(shares) if shares else 0.0

    def _note(self, layer: int, call: AttentionCall) -> None:
        columns = call.key.shape[2]
        if columns <= self._seen[layer]:
            # Rows that make up for a layer later on come without the last token.
            return
        self._seen[layer] = columns
        weights = attention_weights(call, 1)[:, 0, : self._length].mean(dim=0)
        self._mass[layer] = weights + self._mass[layer] if layer in self._mass else weights
        self._steps[layer] += 1
