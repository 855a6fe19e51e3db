"""Selectors of the package: random and boundary, which need not look at a layer, and hkvd and a3, which do."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.selection.base import LayerProbe, Selection, SelectionTask, Selector, pick

__all__ = ["A3Selector", "BoundarySelector", "HKVDSelector", "RandomSelector"]

_A3_LAYER = 1


@dataclass(frozen=True, kw_only=True)
class RandomSelector(Selector):
    """The control: rows drawn without replacement, the same ones for the same prompt and `seed`."""

    name = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise self.refusal("seed", "must be a whole number of 64 bits")

    def begin(self, task: SelectionTask) -> Selection:
        candidates = task.layout.context_rows
        # Seeded by the prompt as well: with one seed for all prompts of a length, "random" would be one fixed pattern.
        ids = torch.tensor(task.layout.token_ids, dtype=torch.int64).numpy().tobytes()
        digest = hashlib.blake2b(ids, digest_size=7, salt=self.seed.to_bytes(8, "little", signed=True)).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        drawn = torch.randperm(candidates.numel(), generator=generator)[: task.budget]
        return Selection(candidates[drawn.sort().values])


@dataclass(frozen=True, kw_only=True)
class BoundarySelector(Selector):
    """The first tokens of each chunk (LegoLink in EPIC, arXiv 2410.15332; a baseline of A3, section 5); costs nothing to choose.

    They lean most on what stands before the chunk, which is not here what its KV was read behind. A prompt's first chunk comes
    last, when all others are recomputed: nothing stands before it that its KV has not seen.
    """

    name = "boundary"

    def begin(self, task: SelectionTask) -> Selection:
        """Return the tokens nearest to a border, as many of each chunk as the budget allows, nearer ones first."""
        layout = task.layout
        places = torch.zeros(len(layout), dtype=torch.int64)
        for span in layout.chunks:
            places[span.start : span.stop] = torch.arange(len(span)) + (0 if span.follows else len(layout))
        rows = layout.context_rows
        return Selection(pick(-places[rows], rows, task.budget))


@dataclass(frozen=True, kw_only=True)
class HKVDSelector(Selector):
    """The tokens whose KV deviates most; each check layer chooses among those kept by the one before.

    CacheBlend, sections 4.2 (high KV deviation) and 4.3 (gradual filtering).
    """

    name = "hkvd"
    # Ascending. Layer 0 measures nothing, since its KV depends on no other token.
    check_layers: tuple[int, ...] = (1,)
    deviation: Literal["value", "key", "both"] = "value"
    # Gradual filtering: the first check layer keeps this many times the average ratio, later ones fewer, so that
    # `recompute_ratio` is the average from the first check layer on. Without effect with one check layer.
    gradual_start: float = 1.5

    def __post_init__(self) -> None:
        layers = self.check_layers
        fits = isinstance(layers, list | tuple) and layers and all(type(layer) is int for layer in layers)
        if not fits or layers[0] < 1 or any(a >= b for a, b in pairwise(layers)):
            raise self.refusal("check_layers", "must be layer indices from 1 on, ascending, each once, at least one")
        object.__setattr__(self, "check_layers", tuple(layers))
        if self.deviation not in ("value", "key", "both"):
            raise self.refusal("deviation", 'must be "value", "key" or "both"')
        if not isinstance(self.gradual_start, int | float) or not 1 <= self.gradual_start < math.inf:
            raise self.refusal("gradual_start", "must be a finite number from 1 on")

    def validate(self, num_layers: int) -> None:
        if self.check_layers[-1] >= num_layers:
            raise self.refusal(
                "check_layers", f"reaches beyond the model's last layer; choose from 1 to {num_layers - 1}"
            )
        self._schedule(num_layers)

    def begin(self, task: SelectionTask) -> Selection:
        keep = dict(zip(self.check_layers, self._schedule(task.num_layers), strict=True))

        def narrow(probe: LayerProbe) -> torch.Tensor:
            deviation = _kv_deviation(probe.fresh, probe.stored, self.deviation)
            return pick(deviation, probe.rows, round(task.budget * keep[probe.layer]))

        return Selection(check_layers=self.check_layers, narrow=narrow)

    def _schedule(self, num_layers: int) -> tuple[float, ...]:
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


def _kv_deviation(fresh: LayerKV, stored: LayerKV, which: str) -> torch.Tensor:
    """Return the squared distance of each token's stored and fresh KV, float32, ``(seq_len,)``; of "both" each over its mean."""
    pairs = zip(fresh, stored, ("key", "value"), strict=True)
    found = [
        (new.float() - old.float()).square_().sum(dim=(0, 1, 3)) for new, old, of in pairs if which in (of, "both")
    ]
    if len(found) == 1:
        return found[0]
    tiny = torch.finfo(torch.float32).tiny
    return torch.stack([each / each.mean().clamp_min(tiny) for each in found]).sum(dim=0)


@dataclass(frozen=True, kw_only=True)
class A3Selector(Selector):
    """The tokens that the question attends to in layer 1, over keys that were just computed (A3, section 4).

    All rows are computed in layer 0, as for hkvd, and probed in layer 1.
    """

    name = "a3"

    def validate(self, num_layers: int) -> None:
        if num_layers <= _A3_LAYER:
            raise ConfigError("selector='a3' looks at layer 1; the model has a single layer: choose another selector")

    def begin(self, task: SelectionTask) -> Selection:
        def narrow(probe: LayerProbe) -> torch.Tensor:
            assert probe.attention is not None
            return pick(probe.attention.sum(dim=(0, 1)), probe.rows, task.budget)

        return Selection(check_layers=(_A3_LAYER,), narrow=narrow, wants_attention=True)
