"""Selectors that let the question choose: the tokens that it attends to."""

from __future__ import annotations

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.selection.base import LayerProbe, Selection, SelectionTask, Selector
from cacheblend_rag.selection.segments import pick

__all__ = [
    "SEGMENT_TOKENS",
    "A3Selector",
    "QuerySelection",
    "QuerySelector",
    "context_layers",
    "look_layers",
    "rows_before",
    "stop_layer",
]

_A3_LAYER = 1
# Shares of the depth, by measurement on the reference model: see docs/selectors.md.
_LOOK_FROM, _LOOK_TO = 0.25, 0.75
SEGMENT_TOKENS = 32
"""Most tokens that are chosen together by default."""


class A3Selector(Selector):
    """The tokens that the question attends to in layer 1, over keys that were just computed (A3, section 4).

    All rows are computed in layer 0, as for hkvd, and probed in layer 1.
    """

    name = "a3"
    needs_attention = True

    def begin(self, task: SelectionTask) -> Selection:
        """Return a selection that narrows once."""
        return _A3Selection(task, self.config.segment_tokens or 1)

    def validate(self, num_layers: int) -> None:
        """Raise `ConfigError` if the model has a single layer."""
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


class QuerySelector(Selector):
    """The tokens that the end of the question attends to in the middle layers, over the stored KV at its place in the prompt.

    The question is computed over the assembled KV first, up to `BlendConfig.look_layers`; what its last token attends to there,
    fused over these layers, chooses the rows, as in ProphetKV and InfoFlow KV (2026). Those compute the question twice. Here the
    chosen rows make up for the layers they have missed and then go on together with the question: nothing is computed twice.
    """

    name = "query"
    needs_attention = True

    def begin(self, task: SelectionTask) -> Selection:
        """Return a selection that looks at the question's attention."""
        return QuerySelection(task, self.config)

    def validate(self, num_layers: int) -> None:
        """Raise `ConfigError` if a layer that the settings name is not there."""
        look_layers(self.config, num_layers)
        stop_layer(self.config, num_layers)


def look_layers(config: BlendConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers in which the question's attention is looked at; at least one layer comes behind them.

    Raises
    ------
    ConfigError
        If the settings name a layer that is not there, or the last one.
    """
    if config.look_layers is not None:
        if config.look_layers[-1] >= num_layers - 1:
            raise ConfigError(
                f"look_layers={config.look_layers} must end before the model's last layer, {num_layers - 1}: the chosen tokens "
                "are computed behind them"
            )
        return config.look_layers
    if num_layers < 2:
        raise ConfigError(
            "looking at attention needs a model of two layers or more; choose a selector that does not, and repair_ratio=0"
        )
    first = min(round(_LOOK_FROM * num_layers), num_layers - 2)
    return tuple(range(first, max(first + 1, min(round(_LOOK_TO * num_layers), num_layers - 1))))


def context_layers(num_layers: int) -> int:
    """Return how many layers, from the first on, carry what a chunk's tokens take from other chunks: two thirds of them.

    By measurement on the reference model (docs/selectors.md). Where they end recompute stops by default.
    """
    return -(-2 * num_layers // 3)


def stop_layer(config: BlendConfig, num_layers: int) -> int | None:
    """Return the layer from which on no chunk token is recomputed, or None where they are in all layers.

    Raises
    ------
    ConfigError
        If the settings name one that is not there.
    """
    stop = context_layers(num_layers) if config.stop_layer is None else config.stop_layer
    if stop > num_layers:
        raise ConfigError(
            f"stop_layer={stop} is beyond the model's {num_layers} layers; stop_layer={num_layers} recomputes in all of them"
        )
    return stop if stop < num_layers else None


def rows_before(stop: int | None, task: SelectionTask) -> int:
    """Return how many rows the budget, an average over all layers, buys where none is recomputed from layer `stop` on."""
    depth = stop or task.num_layers
    return min(round(task.budget * task.num_layers / depth), task.layout.candidate_rows.numel())


class QuerySelection(Selection):
    """Looks at the question's attention in some layers, and then chooses.

    Parameters
    ----------
    task : SelectionTask
        The prompt.
    config : BlendConfig
        The settings.
    """

    def __init__(self, task: SelectionTask, config: BlendConfig) -> None:
        self.look_layers = look_layers(config, task.num_layers)
        self.stop_layer = stop_layer(config, task.num_layers)
        self._layout: PromptLayout = task.layout
        self._segment_tokens = config.segment_tokens or SEGMENT_TOKENS
        self._candidates = task.layout.candidate_rows
        self._budget = rows_before(self.stop_layer, task)
        self._attention = torch.zeros(self._candidates.numel())

    def look(self, layer: int, attention: torch.Tensor) -> None:
        """Add a layer's attention to that of the others."""
        mass = attention.sum(dim=0).cpu()
        # Some layers attend to the context much more than others; each has one vote.
        self._attention += mass / mass.sum().clamp_min(torch.finfo(mass.dtype).tiny)

    def scores(self) -> torch.Tensor:
        """Return the score of each candidate."""
        return self._attention

    def rows(self) -> torch.Tensor:
        """Return the candidates of the highest scores."""
        return pick(self.scores(), self._candidates, self._budget, self._layout, self._segment_tokens)
