"""Naive references: attention weights as the model gives them out, and decoding with a mask for each head instead of eviction."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from tests.core.dense import RecordingCache


@torch.no_grad()
def kept_rows(
    model: PreTrainedModel, ids: Sequence[int], context: tuple[int, int], capacity: int, window: int, kernel: int
) -> list[torch.Tensor]:
    """Return which rows each key head of each layer keeps, from the weights that eager attention hands out.

    Rows are ``(num_kv_heads, kept)``, ascending.
    """
    start, stop = context
    output = model(input_ids=torch.tensor([ids]), output_attentions=True)
    kv_heads = [keys.shape[1] for keys in _keys(model, ids)]
    layers: list[torch.Tensor] = []
    for weights, heads in zip(output.attentions, kv_heads, strict=True):
        group = weights.shape[1] // heads
        chosen = []
        for head in range(heads):
            own = [
                float(weights[0, head * group :][:group, len(ids) - window :, row].sum()) for row in range(start, stop)
            ]
            chosen.append(naive_choice(own, capacity, kernel))
        rows = [[*range(start), *(start + token for token in kept), *range(stop, len(ids))] for kept in chosen]
        layers.append(torch.tensor(rows))
    return layers


def naive_choice(own: Sequence[float], capacity: int, kernel: int) -> list[int]:
    """Return the tokens kept of those with this attention: by the pooled, then by their own, then the earlier."""
    reach = kernel // 2
    pooled = [max(own[max(0, token - reach) : token + reach + 1]) for token in range(len(own))]
    return sorted(sorted(range(len(own)), key=lambda token: (-pooled[token], -own[token], token))[:capacity])


def _keys(model: PreTrainedModel, ids: Sequence[int]) -> list[torch.Tensor]:
    cache = RecordingCache()
    model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True)
    return [layer.keys for layer in cache.layers]


@contextmanager
def hidden_columns(kept: dict[int, torch.Tensor], prompt_tokens: int) -> Iterator[None]:
    """Have eager attention of single rows hide from each key head the prompt's tokens that it did not keep."""
    original = AttentionInterface.get_interface

    def get_interface(
        table: AttentionInterface, implementation: str, default: Callable[..., Any]
    ) -> Callable[..., Any]:
        function = original(table, implementation, default)

        def masked(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            if query.shape[2] == 1 and module.layer_idx in kept:
                rows = kept[module.layer_idx]
                hidden = torch.zeros(rows.shape[0], key.shape[2])
                hidden[:, :prompt_tokens] = -torch.inf
                hidden.scatter_(1, rows, 0.0)
                groups = query.shape[1] // rows.shape[0]
                hidden = hidden.repeat_interleave(groups, dim=0)[None, :, None]
                mask = hidden if mask is None else mask + hidden
            return function(module, query, key, value, mask, *args, **kwargs)

        return masked

    AttentionInterface.get_interface = get_interface  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        AttentionInterface.get_interface = original  # type: ignore[method-assign]


@torch.no_grad()
def dense_decode(
    model: PreTrainedModel,
    ids: Sequence[int],
    kept: dict[int, torch.Tensor],
    steps: int,
    positions: Sequence[int] | None = None,
) -> tuple[list[int], torch.Tensor]:
    """Decode greedily on a cache that holds everything, each key head seeing what it `kept`; return tokens and their logits."""
    cache = RecordingCache()
    places = list(range(len(ids)) if positions is None else positions)
    tokens, logits = list(ids), []
    fed, at = tokens, places
    for _ in range(steps):
        with hidden_columns(kept, len(ids)):
            inputs = {"input_ids": torch.tensor([fed]), "position_ids": torch.tensor([at])}
            output = model(**inputs, past_key_values=cache, use_cache=True)
        logits.append(output.logits[0, -1])
        fed, at = [int(logits[-1].argmax())], [at[-1] + 1]
        tokens = [*tokens, *fed]
    return tokens[len(ids) :], torch.stack(logits)
