"""Choosing the tokens whose KV is recomputed.

`register_selector` adds a selector under a name that `BlendConfig.selector` accepts from then on.
"""

from __future__ import annotations

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.selection.base import LayerProbe, Selection, SelectionTask, Selector
from cacheblend_rag.selection.boundary import BoundarySelector
from cacheblend_rag.selection.fixed import FixedSelection, FullSelector, NoneSelector, RandomSelector
from cacheblend_rag.selection.hkvd import HKVDSelector
from cacheblend_rag.selection.question import A3Selector, QuerySelector

__all__ = [
    "FixedSelection",
    "LayerProbe",
    "Selection",
    "SelectionTask",
    "Selector",
    "make_selector",
    "register_selector",
    "selector_names",
]

_SELECTORS: dict[str, type[Selector]] = {}


def register_selector(selector: type[Selector]) -> type[Selector]:
    """Make a selector available under its name; also usable as a class decorator.

    Parameters
    ----------
    selector : type[Selector]
        The class; its `name` must be new.

    Returns
    -------
    type[Selector]
        The same class.

    Raises
    ------
    ConfigError
        If the name is taken by another class.
    """
    if selector.name == "auto" or _SELECTORS.get(selector.name, selector) is not selector:
        raise ConfigError(f"a selector named {selector.name!r} exists already; give yours another name")
    _SELECTORS[selector.name] = selector
    return selector


for _selector in (
    NoneSelector,
    FullSelector,
    RandomSelector,
    BoundarySelector,
    HKVDSelector,
    A3Selector,
    QuerySelector,
):
    register_selector(_selector)


def selector_names() -> tuple[str, ...]:
    """Return the names that `BlendConfig.selector` accepts."""
    return ("auto", *sorted(_SELECTORS))


def make_selector(config: BlendConfig) -> Selector:
    """Return the selector that the settings name.

    Raises
    ------
    ConfigError
        If there is no selector of that name.
    """
    name = HKVDSelector.name if config.selector == "auto" else config.selector
    if name not in _SELECTORS:
        raise ConfigError(f"selector={config.selector!r} is unknown; choose one of {', '.join(selector_names())}")
    return _SELECTORS[name](config)
