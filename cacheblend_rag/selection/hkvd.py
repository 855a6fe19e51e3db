"""High-KV-deviation selection with gradual filtering (CacheBlend, sections 4.2 and 4.3)."""

from __future__ import annotations

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.selection.base import LayerProbe, Selection, SelectionTask, Selector
from cacheblend_rag.selection.segments import pick

__all__ = ["HKVDSelector", "gradual_schedule", "kv_deviation"]


def kv_deviation(fresh: LayerKV, stored: LayerKV, which: str) -> torch.Tensor:
    """Return how far each token's stored KV is from the freshly computed one.

    Parameters
    ----------
    fresh, stored : LayerKV
        ``(1, num_kv_heads, seq_len, head_dim)`` each, at the same positions.
    which : {"value", "key", "both"}
        What is compared. "both" adds the two squared distances, each over its mean, since keys and values differ in
        scale.

    Returns
    -------
    torch.Tensor
        Squared L2 distance over heads and dimensions, float32, ``(seq_len,)``.
    """

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


def gradual_schedule(config: BlendConfig, num_layers: int) -> tuple[float, ...]:
    """Return the multiple of the recompute ratio that each check layer keeps.

    Parameters
    ----------
    config : BlendConfig
        `check_layers`, and either `ratio_schedule`, taken as it is, or `gradual_start`.
    num_layers : int
        Decoder layers of the model.

    Returns
    -------
    tuple of float
        Falling linearly from `gradual_start`, such that the mean over all layers from the first check layer on is 1;
        one check layer keeps exactly the ratio.

    Raises
    ------
    ConfigError
        If the schedule would have to fall to nothing to keep the mean.
    """
    if config.ratio_schedule is not None:
        return config.ratio_schedule
    layers = config.check_layers
    if len(layers) == 1:
        return (1.0,)
    spans = [stop - start for start, stop in zip(layers, (*layers[1:], num_layers), strict=True)]
    steps = [number / (len(layers) - 1) for number in range(len(layers))]
    # mean of start + (end - start) * step over the spans equals 1, solved for end
    weight = sum(span * step for span, step in zip(spans, steps, strict=True))
    end = config.gradual_start + (1 - config.gradual_start) * sum(spans) / weight
    if end <= 0:
        raise ConfigError(
            f"gradual_start={config.gradual_start} leaves nothing for the last of check_layers={layers} in a model "
            f"of {num_layers} layers; lower it, or give ratio_schedule"
        )
    return tuple(config.gradual_start + (end - config.gradual_start) * step for step in steps)


class HKVDSelector(Selector):
    """The tokens whose KV deviates most; each check layer chooses among those kept by the one before."""

    name = "hkvd"

    def begin(self, task: SelectionTask) -> Selection:
        """Return a selection that narrows at each check layer."""
        return _HKVDSelection(task, self.config)

    def validate(self, num_layers: int) -> None:
        """Raise `ConfigError` if a check layer is out of range or the schedule is impossible."""
        if self.config.check_layers[-1] >= num_layers:
            raise ConfigError(
                f"check_layers={self.config.check_layers} reaches beyond the model's last layer; choose from 1 to "
                f"{num_layers - 1}"
            )
        gradual_schedule(self.config, num_layers)


class _HKVDSelection(Selection):
    def __init__(self, task: SelectionTask, config: BlendConfig) -> None:
        self.check_layers = config.check_layers
        self._deviation = config.deviation
        self._layout = task.layout
        self._segment_tokens = config.segment_tokens or 1
        multiples = gradual_schedule(config, task.num_layers)
        self._keep = {
            layer: round(task.budget * multiple) for layer, multiple in zip(self.check_layers, multiples, strict=True)
        }

    def narrow(self, probe: LayerProbe) -> torch.Tensor:
        deviation = kv_deviation(probe.fresh, probe.stored, self._deviation)
        return pick(deviation, probe.rows, self._keep[probe.layer], self._layout, self._segment_tokens)
