"""Deciding whether and how a prompt is blended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import Decoder
from cacheblend_rag.selection import FixedSelection, Selection, SelectionTask, Selector, make_selector
from cacheblend_rag.selection.question import look_layers, stop_layer

__all__ = ["Plan", "check_attention", "check_selector", "make_plan", "whole_plan"]


@dataclass(frozen=True)
class Plan:
    """How one prompt is prefilled.

    Attributes
    ----------
    selection : Selection or None
        Chooses the rows to recompute; None means that the whole prompt is computed.
    selector : str
        Name of the selector; "full" without a selection.
    ratio : float
        Share of the chunk tokens to recompute; 1 without a selection.
    fallback_reason : str or None
        Why the whole prompt is computed although blending was asked for.
    """

    selection: Selection | None
    selector: str
    ratio: float = 1.0
    fallback_reason: str | None = None


def check_selector(config: BlendConfig, num_layers: int) -> Selector:
    """Return the selector that the settings name, if it can work on a model of `num_layers` layers.

    Raises
    ------
    ConfigError
        If there is no such selector, or it cannot.
    """
    selector = make_selector(config)
    selector.validate(num_layers)
    if config.source_attention:
        look_layers(config, num_layers)
    if config.repair_ratio:
        look_layers(config, num_layers)
        stop_layer(config, num_layers)
    return selector


def check_attention(config: BlendConfig, decoder: Decoder) -> None:
    """See that a model shows what the settings need to see of it: its attention, and the KV of check layers.

    Raises
    ------
    ConfigError
        If it does not.
    """
    name = type(decoder.model).__name__
    if config.source_attention and not decoder.shows_attention:
        raise ConfigError(f"source_attention=True: {name} does not show what it attends to; leave it out")
    if not config.enabled:
        return
    task = SelectionTask(PromptLayout((0,), (0,), ()), decoder.num_layers, 0)
    for layer in make_selector(config).begin(task).check_layers:
        if layer >= decoder.num_kv_layers:
            raise ConfigError(
                f"check layer {layer} of {name} has no KV of its own to compare, as all its layers from {decoder.num_kv_layers} "
                "on; choose earlier check_layers"
            )
    if decoder.shows_attention:
        return
    if make_selector(config).needs_attention:
        raise ConfigError(
            f"selector={config.selector!r} goes by what the question attends to, which {name} does not show; choose hkvd"
        )
    if config.repair_ratio:
        raise ConfigError(
            f"repair_ratio={config.repair_ratio} goes by what the answer attends to, which {name} does not show; leave it at 0"
        )


def whole_plan(
    config: BlendConfig, layout: PromptLayout, unsupported: str | None, ratio: float | Literal["auto"]
) -> Plan | None:
    """Return the plan of a prompt that is computed as a whole, or None if it is to be blended.

    Parameters
    ----------
    config : BlendConfig
        The settings in force for this prompt.
    layout : PromptLayout
        The prompt.
    unsupported : str or None
        Why the model cannot be blended, if it cannot.
    ratio : float or "auto"
        Share of the chunk tokens to recompute, from 0 to 1; "auto" while it is not decided.

    Raises
    ------
    ConfigError
        If the selector is unknown.
    """
    if not config.enabled:
        return Plan(None, "full")
    if unsupported is not None:
        return Plan(None, "full", fallback_reason=unsupported)
    if not layout.chunks:
        return Plan(None, "full", fallback_reason="the prompt has no chunks")
    # For speed alone nothing is given up that chunks remember.
    if layout.context_tokens < config.min_tokens and not layout.remembers:
        return Plan(
            None,
            "full",
            fallback_reason=f"the chunks have {layout.context_tokens} tokens, fewer than min_tokens={config.min_tokens}",
        )
    selector = make_selector(config).name
    if selector == "full" or (ratio == 1 and selector != "none"):
        return Plan(None, "full")
    return None


def make_plan(
    config: BlendConfig,
    layout: PromptLayout,
    num_layers: int,
    ratio: float,
) -> Plan:
    """Lay out how a prompt is blended at a ratio, after `whole_plan` had nothing against it.

    Parameters
    ----------
    config : BlendConfig
        The settings in force for this prompt.
    layout : PromptLayout
        The prompt.
    num_layers : int
        Decoder layers of the model.
    ratio : float
        Share of the chunk tokens to recompute, from 0 to 1.

    Returns
    -------
    Plan
        What to do.

    Raises
    ------
    ConfigError
        If the selector is unknown or cannot work on this model.
    """
    selector = check_selector(config, num_layers)
    if config.recompute_ratio == 0 or not layout.chunks:
        # Nothing is asked for, or nothing left to choose from: no selector is to spend anything on it.
        return Plan(FixedSelection(layout.candidate_rows[:0]), selector.name, ratio)
    budget = min(round(ratio * layout.context_tokens), layout.candidate_rows.numel())
    return Plan(selector.begin(SelectionTask(layout, num_layers, budget)), selector.name, ratio)
