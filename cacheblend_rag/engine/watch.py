"""Watching a model from outside: what layers and answers attend to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from transformers import Cache, PreTrainedModel

from cacheblend_rag.engine.generation import PrefillResult
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.fuse import BlendCache
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.model import (
    AttentionCall,
    KVCache,
    attention_weights,
    past_adapters,
    uncompiled,
    watch_attention,
)

__all__ = [
    "LayerWatcher",
    "SourceAttention",
    "WatchedForward",
    "WatchedPrefill",
    "last_logits",
]

LayerWatcher: TypeAlias = Callable[[int, AttentionCall], None]
"""Called with a layer's number and what its attention was called with; the last row is the last token of the prompt."""


def last_logits(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Cache | None, count: int = 1
) -> torch.Tensor:
    """Prefill a prompt and return the logits behind its last tokens.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    inputs : dict
        The prompt's `input_ids`, ``(1, prompt_len)``, and what goes with them.
    cache : Cache or None
        The cache to fill, which may hold the prompt's beginning; None where the model is to have one of its own, if any.
    count : int
        Behind how many of its tokens, all of which are computed.

    Returns
    -------
    torch.Tensor
        ``(count, vocab)``, where the model put them.
    """
    options: dict[str, Any] = {} if cache is None else {"past_key_values": cache, "use_cache": True}
    if model._supports_logits_to_keep():  # type: ignore[operator]  # as generate asks
        options["logits_to_keep"] = count
    held = 0 if cache is None else cache.get_seq_length()
    # As generate does: what a cache begins with is not computed.
    inputs = {name: tensor[:, held:] for name, tensor in inputs.items()}
    logits: torch.Tensor = past_adapters(model)(**inputs, **options).logits
    return logits[0, -count:]


@contextmanager
def _watching(model: PreTrainedModel, cache: KVCache, layers: Sequence[int], watcher: LayerWatcher) -> Iterator[None]:
    """Call a watcher whenever one of these layers of a cache is attended to."""

    def after_attention(call: AttentionCall) -> None:
        layer = next((layer for layer in layers if cache.kv_layers[layer].keys is call.key), None)
        if layer is not None:
            watcher(layer, call)

    with uncompiled(model), watch_attention(after_attention):
        yield


@dataclass(frozen=True, eq=False)
class WatchedPrefill:
    """Result of `BlendEngine.watch_prefill`.

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
        """Return the logits of the token after the prompt, ``(vocab,)``, on the CPU.

        Raises
        ------
        UnsupportedModelError
            If not every layer's attention can be watched.
        """
        name = type(self.model).__name__
        if cache is None:
            raise UnsupportedModelError(f"{name} cannot be blended, and its layers cannot be watched")
        waiting = list(range(len(cache.kv_layers)))

        def watch(layer: int, call: AttentionCall) -> None:
            # Rows that make up for a layer later on come without the last token, so each layer counts once.
            waiting.remove(layer)
            self.watcher(layer, call)

        with _watching(self.model, cache, waiting, watch):
            logits = last_logits(self.model, inputs, cache)[0].cpu()
        if waiting:
            raise UnsupportedModelError(
                f"{name}: the attention of layers {', '.join(map(str, waiting))} cannot be watched"
            )
        self.kv = cache.kv()
        return logits


class SourceAttention:
    """Watches the rows after which the tokens of an answer are written: the prompt's last row, and then each new token's.

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
        self._steps = Counter[int]()
        self._seen = Counter[int]()

    @contextmanager
    def __call__(self, cache: BlendCache) -> Iterator[None]:
        """Watch a cache being filled and read for the duration of a ``with`` block, from the beginning."""
        self._mass.clear()
        self._steps.clear()
        self._seen.clear()
        with _watching(self._model, cache, self._layers, self._note):
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
