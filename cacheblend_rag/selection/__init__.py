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
from cacheblend_rag.selection.ingest import IngestSelector, QueryIngestSelector
from cacheblend_rag.selection.question import A3Selector, QuerySelector

__all__ = [
    "FixedSelection",
    "LayerProbe",
    "Selection",
    "SelectionTask",
    "Selector",
    "make_selector",
    "num_neighbours",
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
    IngestSelector,
    QueryIngestSelector,
):
    register_selector(_selector)


def _auto(config: BlendConfig) -> str:
    """Return what "auto" stands for: what measures best, where chunks are measured when they are added, else CacheBlend's own.

    Measuring makes adding chunks about four times as much work, so it is not begun unasked.
    """
    measures = config.neighbours and config.encode_on == "add"
    return IngestSelector.name if measures else HKVDSelector.name


_NEIGHBOURS = 2


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
    name = _auto(config) if config.selector == "auto" else config.selector
    if name not in _SELECTORS:
        raise ConfigError(f"selector={config.selector!r} is unknown; choose one of {', '.join(selector_names())}")
    return _SELECTORS[name](config)


def num_neighbours(config: BlendConfig) -> int:
    """Return behind how many chunks a new chunk is encoded to measure its sensitivity; 0 where it is not measured.

    Raises
    ------
    ConfigError
        If there is no selector of the name that the settings give.
    """
    if config.neighbours is not None:
        return config.neighbours
    return _NEIGHBOURS if make_selector(config).needs_sensitivity else 0
