"""Selectors that let the question choose: the tokens that it attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.selection.base import LayerProbe, Selection, SelectionTask, Selector, pick

__all__ = ["SEGMENT_TOKENS", "A3Selector", "QuerySelector", "look_layers", "stop_layer"]

_A3_LAYER = 1
# Shares of the depth, by measurement on a small model: see docs/selectors.md.
_LOOK_FROM, _LOOK_TO = 0.25, 0.75
SEGMENT_TOKENS = 32
"""Most tokens that are chosen together by default."""


@dataclass(frozen=True, kw_only=True)
class A3Selector(Selector):
    """The tokens that the question attends to in layer 1, over keys that were just computed (A3, section 4).

    All rows are computed in layer 0, as for hkvd, and probed in layer 1.
    """

    name = "a3"
    needs_attention = True
    # Tokens of a chunk that are chosen together, at most; 1 chooses each token for itself.
    segment_tokens: int = 1

    def __post_init__(self) -> None:
        self.check_segment(self.segment_tokens)

    def begin(self, task: SelectionTask) -> Selection:
        return _A3Selection(task, self.segment_tokens)

    def validate(self, num_layers: int) -> None:
        if num_layers <= _A3_LAYER:
            raise ConfigError("selector='a3' looks at layer 1; the model has a single layer: choose another selector")


class _A3Selection(Selection):
    check_layers = (_A3_LAYER,)
    wants_attention = True

    def __init__(self, task: SelectionTask, segment_tokens: int) -> None:
        self._task = task
        self._segment_tokens = segment_tokens

    def narrow(self, probe: LayerProbe) -> torch.Tensor:
        assert probe.attention is not None
        scores = probe.attention.sum(dim=(0, 1))
        return pick(scores, probe.rows, self._task.budget, self._task.layout, self._segment_tokens)


@dataclass(frozen=True, kw_only=True)
class QuerySelector(Selector):
    """The tokens that the end of the question attends to in the middle layers, over the stored KV at its place in the prompt.

    The question is computed over the assembled KV first, up to `look_layers`; what its last token attends to there, fused
    over these layers, chooses the rows, as in ProphetKV and InfoFlow KV (2026). Those compute the question twice. Here the
    chosen rows make up for the layers they have missed and then go on together with the question: nothing is computed
    twice.
    """

    name = "query"
    needs_attention = True
    # Ascending; by default those from a quarter to three quarters of the depth.
    look_layers: tuple[int, ...] | None = None
    # The layer from which on nothing is recomputed any more, so that more tokens can be recomputed before it; by default
    # two thirds of the depth. As many as the model has layers recomputes in all of them.
    stop_layer: int | None = None
    # As in `A3Selector`.
    segment_tokens: int = SEGMENT_TOKENS

    def __post_init__(self) -> None:
        object.__setattr__(self, "look_layers", self.checked_layers("look_layers", 0))
        self.check_segment(self.segment_tokens)
        if self.stop_layer is not None and (type(self.stop_layer) is not int or self.stop_layer < 1):
            raise self.refusal("stop_layer", "must be a layer from 1 on, or None")

    def begin(self, task: SelectionTask) -> Selection:
        return _QuerySelection(task, self)

    def validate(self, num_layers: int) -> None:
        look_layers(self.look_layers, num_layers)
        stop_layer(self.stop_layer, num_layers)


def look_layers(asked: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    """Return the layers in which the question's attention is looked at; one layer at least comes after them, or `ConfigError`."""
    if asked is not None:
        if asked[-1] >= num_layers - 1:
            raise ConfigError(
                f"look_layers={asked} must end before the model's last layer, {num_layers - 1}: the chosen tokens "
                "are computed after them"
            )
        return asked
    if num_layers < 2:
        raise ConfigError(
            "looking at attention needs two layers, the model has one; leave out query, Repair and SourceAttention"
        )
    first = min(round(_LOOK_FROM * num_layers), num_layers - 2)
    return tuple(range(first, max(first + 1, min(round(_LOOK_TO * num_layers), num_layers - 1))))


def stop_layer(asked: int | None, num_layers: int) -> int | None:
    """Return from which layer on no chunk token is recomputed, None for no layer; `ConfigError` beyond the last."""
    # By measurement on a small model (docs/selectors.md) the first two thirds of the layers carry what a chunk's tokens
    # take from other chunks.
    stop = -(-2 * num_layers // 3) if asked is None else asked
    if stop > num_layers:
        raise ConfigError(
            f"stop_layer={stop} is beyond the model's {num_layers} layers; stop_layer={num_layers} recomputes in all of them"
        )
    return stop if stop < num_layers else None


class _QuerySelection(Selection):
    """Looks at the question's attention in some layers, and then chooses."""

    def __init__(self, task: SelectionTask, options: QuerySelector) -> None:
        self.look_layers = look_layers(options.look_layers, task.num_layers)
        self.stop_layer = stop_layer(options.stop_layer, task.num_layers)
        self._layout: PromptLayout = task.layout
        self._segment_tokens = options.segment_tokens
        self._candidates = task.layout.context_rows
        depth = self.stop_layer or task.num_layers
        # The budget is an average over all layers.
        self._budget = min(round(task.budget * task.num_layers / depth), self._candidates.numel())
        self._attention = torch.zeros(self._candidates.numel())

    def look(self, layer: int, attention: torch.Tensor) -> None:
        mass = attention.sum(dim=0).cpu()
        # Some layers attend to the context much more than others; each has one vote.
        self._attention += mass / mass.sum().clamp_min(torch.finfo(mass.dtype).tiny)

    def rows(self) -> torch.Tensor:
        return pick(self._attention, self._candidates, self._budget, self._layout, self._segment_tokens)
