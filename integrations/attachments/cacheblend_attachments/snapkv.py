"""Dropping context KV layer by layer while a prompt is prefilled (SnapKV, arXiv 2404.14469; A3, "Extension")."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from cacheblend_attachments.watching import Watching, watch_forward
from cacheblend_rag.engine.backend import RunningForward
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.model import (
    CACHE,
    REACHES,
    AttentionCall,
    attention_weights,
    layer_types,
    watch_attention,
)

__all__ = ["Eviction", "SnapKV", "choose_tokens", "context_attention"]

_FULL_ATTENTION = "full_attention"


class SnapKV(Watching):
    """Drops context KV after the prefill, so that decoding is faster and the cache smaller.

    As soon as a layer has attended, each of its key heads keeps the context tokens that the end of the prompt attends to most;
    the memory of the others is given back before the next layer is computed. What stands before the first chunk and after the
    last one is always kept. Keys are rotated already, so the tokens that are left need not stand next to each other.

    Layers that attend to a sliding window are kept whole, unless the window holds the prompt and its answer: which token is
    inside is a question of its place, and the places that are left differ from head to head. The report says so (`kept_reason`).

    Parameters
    ----------
    kv_capacity : int or float
        How much KV of the context each layer and head keeps for decoding: an integer is a number of tokens, a float a share of
        the context, above 0 and at most 1. The context reaches from the first chunk to the last.
    observation_window : int
        The last tokens of the prompt, after the last chunk, whose attention says which context tokens are kept.
    pooling_kernel : int
        Tokens, an odd number, over which attention is pooled, so that what is attended to is kept with what surrounds it.

    Raises
    ------
    ConfigError
        If a value has no meaning.
    """

    drops_kv = True

    def __init__(self, kv_capacity: int | float, *, observation_window: int = 32, pooling_kernel: int = 7) -> None:
        if not (type(kv_capacity) is int and kv_capacity >= 1) and not (
            type(kv_capacity) is float and 0 < kv_capacity <= 1
        ):
            raise ConfigError(
                f"kv_capacity={kv_capacity!r:.40} must be a number of tokens (an integer from 1) or a share of the context (a "
                "float above 0 and at most 1.0)"
            )
        if type(observation_window) is not int or observation_window < 1:
            raise ConfigError(f"observation_window={observation_window!r:.40} must be a number of tokens, 1 or more")
        if type(pooling_kernel) is not int or pooling_kernel < 1 or pooling_kernel % 2 == 0:
            raise ConfigError(
                f"pooling_kernel={pooling_kernel!r:.40} must be odd, so that both sides have the same number of neighbours"
            )
        self.kv_capacity = kv_capacity
        self.observation_window = observation_window
        self.pooling_kernel = pooling_kernel

    @contextmanager
    def around(self, forward: RunningForward) -> Iterator[None]:
        eviction = Eviction(self, forward)
        with eviction():
            yield
        forward.request.state.figures["kept_reason"] = eviction.kept_reason

    def for_tenant(self) -> SnapKV:
        return SnapKV(self.kv_capacity, observation_window=self.observation_window, pooling_kernel=self.pooling_kernel)


class Eviction:
    """The eviction of one prompt's context KV: `evicted_tokens` by each head of the layers that are not kept whole."""

    def __init__(self, asked: SnapKV, forward: RunningForward) -> None:
        prompt = forward.request.prompt
        self._model = forward.decoder.model
        self._cache = forward.cache
        self._prompt_tokens = len(prompt.layout)
        self._start, self._stop = prompt.context
        self._room = forward.room
        tokens = self._stop - self._start
        share = asked.kv_capacity
        self._capacity = min(tokens, share if isinstance(share, int) else max(1, round(share * tokens)))
        self._window = min(asked.observation_window, self._prompt_tokens - self._stop)
        self._kernel = asked.pooling_kernel
        self.kept_reason: str | None = None
        self._waiting: list[int] = []
        if self._capacity < tokens:
            self._waiting = self._evictable(self._prompt_tokens + forward.headroom)
        self.evicted_tokens = tokens - self._capacity if self._waiting else 0

    def _evictable(self, end: int) -> list[int]:
        config = self._model.config.get_text_config(decoder=True)
        types = layer_types(self._model, len(self._cache.kv_layers))
        layers, kept = [], []
        for number, kind in enumerate(types):
            reach = getattr(config, REACHES[kind], None) if kind in REACHES else None
            if kind == _FULL_ATTENTION or (reach is not None and reach >= end):
                layers.append(number)
            else:
                kept.append(f"{kind} of {reach} tokens" if reach else kind)
            # transformers makes one mask for each type of layer, by the length of the first layer of that type.
            self._cache.kv_layers[number].is_sliding = kind in REACHES
        if kept:
            self.kept_reason = f"{len(kept)} of {len(types)} layers are kept whole: {', '.join(sorted(set(kept)))}"
        return layers

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Evict during the model's next forward pass over the cache, for the duration of a ``with`` block."""
        with ExitStack() as stack:
            if self._waiting:
                stack.enter_context(watch_attention(self._after_attention))
                stack.enter_context(watch_forward(self._model, after=partial(self._after_prefill, stack)))
            yield

    def _after_attention(self, call: AttentionCall) -> None:
        for layer in self._waiting:
            held = self._cache.kv_layers[layer]
            if held.keys is call.key:
                break
        else:
            return
        if call.position_bias is not None:
            raise UnsupportedModelError(
                f"{type(self._model).__name__}, layer {layer}: its attention bias depends on the distance between tokens in "
                "the cache, which eviction changes; attach no SnapKV"
            )
        attention = context_attention(call, self._window, self._start, self._stop)
        chosen = choose_tokens(attention, self._capacity, self._kernel) + self._start
        before = torch.arange(self._start, device=chosen.device)
        after = torch.arange(self._stop, self._prompt_tokens, device=chosen.device)
        heads = chosen.shape[0]
        rows = torch.cat((before.expand(heads, -1), chosen, after.expand(heads, -1)), dim=1)
        self._waiting.remove(layer)
        held.keep(rows, self._room)

    def _after_prefill(
        self, stack: ExitStack, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if kwargs.get(CACHE) is not self._cache:
            return
        # Decoding is not watched, and costs what it costs without eviction.
        stack.close()
        if self._waiting:
            raise UnsupportedModelError(
                f"{type(self._model).__name__}: the attention of layers {', '.join(map(str, self._waiting))} cannot be watched, "
                "so there is no way to choose the KV to evict; attach no SnapKV"
            )


def context_attention(call: AttentionCall, window: int, start: int, stop: int) -> torch.Tensor:
    """Return the attention that a prompt's last `window` rows pay to the context, ``(num_kv_heads, stop - start)``, float32.

    It is summed over these rows and over the query heads that share a key head (SnapKV, section 4).
    """
    weights = attention_weights(call, window)[..., start:stop]
    # Query heads that share a key head stand next to each other.
    return weights.sum(dim=1).view(call.key.shape[1], -1, stop - start).sum(dim=1)


def choose_tokens(attention: torch.Tensor, capacity: int, kernel: int) -> torch.Tensor:
    """Return the tokens of the context that each head keeps, ascending, ``(num_kv_heads, capacity)``.

    A token counts as much as the most attended one within the pooling window around it: what is attended to is kept with what
    surrounds it. Among equals, those that are attended to more themselves come first, then the earlier ones.
    """
    pooled = functional.max_pool1d(attention, kernel, stride=1, padding=kernel // 2)
    order = attention.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, pooled.gather(1, order).argsort(dim=1, descending=True, stable=True))
    return order[:, :capacity].sort(dim=1).values
