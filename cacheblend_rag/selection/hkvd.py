"""High-KV-deviation selection with gradual filtering (CacheBlend, sections 4.2 and 4.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.selection.base import LayerProbe, Selection, SelectionTask, Selector, pick

__all__ = ["HKVDSelector", "kv_deviation"]


def kv_deviation(fresh: LayerKV, stored: LayerKV, which: str) -> torch.Tensor:
    """Return the squared distance of each token's stored and fresh KV, float32, ``(seq_len,)``; of "both" each over its mean."""

    def distance(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return (new.float() - old.float()).square_().sum(dim=(0, 1, 3))

    if which == "key":
        return distance(fresh.keys, stored.keys)
    values = distance(fresh.values, stored.values)
    if which == "value":
        return values
    keys = distance(fresh.keys, stored.keys)
    tiny = torch.finfo(torch.float32).tiny
    return keys / keys.mean().clamp_min(tiny) + values / values.mean().clamp_min(tiny)


@dataclass(frozen=True, kw_only=True)
class HKVDSelector(Selector):
    """The tokens whose KV deviates most; each check layer chooses among those kept by the one before."""

    name = "hkvd"
    # Ascending. Layer 0 measures nothing, since its KV depends on no other token.
    check_layers: tuple[int, ...] = (1,)
    deviation: Literal["value", "key", "both"] = "value"
    # Gradual filtering (CacheBlend, section 4.3): the first check layer keeps this many times the average ratio, later ones
    # fewer, so that `recompute_ratio` is the average from the first check layer on. Without effect with one check layer.
    gradual_start: float = 1.5
    # Tokens of a chunk that are chosen together, at most; 1 chooses each token for itself.
    segment_tokens: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "check_layers", self.checked_layers("check_layers", 1))
        self.check_segment(self.segment_tokens)
        if self.deviation not in ("value", "key", "both"):
            raise self.refusal("deviation", 'must be "value", "key" or "both"')
        if not isinstance(self.gradual_start, int | float) or not 1 <= self.gradual_start < math.inf:
            raise self.refusal("gradual_start", "must be a finite number from 1 on")

    def begin(self, task: SelectionTask) -> Selection:
        return _HKVDSelection(task, self)

    def validate(self, num_layers: int) -> None:
        if self.check_layers[-1] >= num_layers:
            raise self.refusal(
                "check_layers", f"reaches beyond the model's last layer; choose from 1 to {num_layers - 1}"
            )
        self.schedule(num_layers)

    def schedule(self, num_layers: int) -> tuple[float, ...]:
        """Return the multiple of the ratio that each check layer keeps: falling linearly from `gradual_start`, on average 1."""
        layers = self.check_layers
        if len(layers) == 1:
            return (1.0,)
        spans = [stop - start for start, stop in zip(layers, (*layers[1:], num_layers), strict=True)]
        steps = [number / (len(layers) - 1) for number in range(len(layers))]
        # mean of start + (end - start) * step over the spans equals 1, solved for end
        weight = sum(span * step for span, step in zip(spans, steps, strict=True))
        end = self.gradual_start + (1 - self.gradual_start) * sum(spans) / weight
        if end <= 0:
            raise self.refusal(
                "gradual_start",
                f"leaves nothing for the last of check_layers={layers} in a model of {num_layers} layers; lower it",
            )
        return tuple(self.gradual_start + (end - self.gradual_start) * step for step in steps)


class _HKVDSelection(Selection):
    def __init__(self, task: SelectionTask, options: HKVDSelector) -> None:
        self.check_layers = options.check_layers
        self._deviation = options.deviation
        self._layout = task.layout
        self._segment_tokens = options.segment_tokens
        multiples = options.schedule(task.num_layers)
        self._keep = {
            layer: round(task.budget * multiple) for layer, multiple in zip(self.check_layers, multiples, strict=True)
        }

    def narrow(self, probe: LayerProbe) -> torch.Tensor:
        deviation = kv_deviation(probe.fresh, probe.stored, self._deviation)
        return pick(deviation, probe.rows, self._keep[probe.layer], self._layout, self._segment_tokens)
