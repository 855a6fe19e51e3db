"""From settings to what chooses the rows of a prompt that are recomputed."""

from __future__ import annotations

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import Decoder
from cacheblend_rag.selection import FixedSelection, Selection, SelectionTask, Selector, make_selector

__all__ = ["check_layers", "check_selector", "is_full", "make_selection"]


def check_selector(blend: BlendConfig, num_layers: int, decoder: Decoder | None = None) -> Selector:
    """Return the selector that settings name; `ConfigError` if a model of so many layers, or `decoder`, lacks what it needs."""
    selector = make_selector(blend.selector)
    selector.validate(num_layers)
    if decoder is None or not blend.enabled:
        return selector
    name = type(decoder.model).__name__
    for layer in check_layers(selector, num_layers):
        if layer >= decoder.num_kv_layers:
            raise ConfigError(
                f"check layer {layer} of {name} has no KV of its own to compare, as all its layers from {decoder.num_kv_layers} "
                "on; choose earlier check_layers"
            )
    if selector.needs_attention and not decoder.shows_attention:
        raise ConfigError(
            f"selector {selector.name!r} needs the question's attention, which {name} does not show; choose hkvd"
        )
    return selector


def is_full(blend: BlendConfig) -> bool:
    """Whether settings have all of a prompt computed, whatever is stored of it."""
    selector = make_selector(blend.selector).name
    return not blend.enabled or selector == "full" or (blend.recompute_ratio == 1 and selector != "none")


def make_selection(blend: BlendConfig, layout: PromptLayout, num_layers: int) -> Selection:
    """Return what chooses the rows of a prompt that are recomputed."""
    budget = round(blend.recompute_ratio * layout.context_tokens)
    if budget == 0:
        # No selector is to spend anything on choosing nothing.
        return FixedSelection(layout.context_rows[:0])
    return make_selector(blend.selector).begin(SelectionTask(layout, num_layers, budget))


def check_layers(selector: Selector, num_layers: int) -> tuple[int, ...]:
    """Return the layers at which a selector compares KV, ascending."""
    return tuple(selector.begin(SelectionTask(PromptLayout((0,), (0,), ()), num_layers, 0)).check_layers)
