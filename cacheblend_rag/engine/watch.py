"""Prefilling a prompt while somebody looks at what its layers attend to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from transformers import PreTrainedModel

from cacheblend_rag.engine.firsttoken import last_logits
from cacheblend_rag.engine.generation import PrefillResult
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import AttentionCall, KVCache, uncompiled, watch_attention

__all__ = ["LayerWatcher", "WatchedForward", "WatchedPrefill"]

LayerWatcher: TypeAlias = Callable[[int, AttentionCall], None]
"""Called with a layer's number and what its attention was called with; the last row is the last token of the prompt."""


@dataclass(frozen=True, eq=False)
class WatchedPrefill:
    """What `BlendEngine.watch_prefill` returns.

    Attributes
    ----------
    result : PrefillResult
        What `prefill` would have returned.
    layout : PromptLayout
        Where the chunks stand in the prompt.
    recomputed_rows : torch.Tensor
        The chunk rows that were recomputed, ascending, int64; all of them where the whole prompt was computed.
    kv : list of LayerKV
        The KV of the whole prompt that decoding would go on with, ``(1, num_kv_heads, prompt_len, head_dim)`` for each layer.
    """

    result: PrefillResult
    layout: PromptLayout
    recomputed_rows: torch.Tensor
    kv: list[LayerKV]


@dataclass(eq=False)
class WatchedForward:
    """One forward pass over a prompt, each layer of which is shown to a watcher as it attends.

    Attributes
    ----------
    model : PreTrainedModel
        The model.
    watcher : LayerWatcher
        Called once for each layer, in order.
    kv : list of LayerKV
        The cache's layers after the pass.
    """

    model: PreTrainedModel
    watcher: LayerWatcher
    kv: list[LayerKV] = field(default_factory=list)

    def __call__(self, cache: KVCache | None, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits of the token behind the prompt, ``(vocab,)``, on the CPU.

        Raises
        ------
        UnsupportedModelError
            If not every layer's attention can be watched.
        """
        name = type(self.model).__name__
        if cache is None:
            raise UnsupportedModelError(f"{name} cannot be blended, and its layers cannot be watched")
        waiting = list(range(len(cache.kv_layers)))

        def after_attention(call: AttentionCall) -> None:
            for layer in waiting:
                if cache.kv_layers[layer].keys is call.key:
                    # Rows that make up for a layer later on come without the last token, so each layer counts once.
                    waiting.remove(layer)
                    self.watcher(layer, call)
                    return

        with uncompiled(self.model), watch_attention(after_attention):
            logits = last_logits(self.model, inputs, cache).cpu()
        if waiting:
            raise UnsupportedModelError(
                f"{name}: the attention of layers {', '.join(map(str, waiting))} cannot be watched"
            )
        self.kv = cache.kv()
        return logits
