"""Choosing the tokens whose KV is recomputed.

`register_selector` adds a selector under a name that `BlendConfig.selector` accepts from then on.
"""

from __future__ import annotations

import ast
from dataclasses import fields
from functools import lru_cache
from typing import Any

from cacheblend_rag.config import BlendConfig, did_you_mean
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.selection.base import LayerProbe, Selection, SelectionTask, Selector
from cacheblend_rag.selection.ours import (
    A3Selector,
    BoundarySelector,
    HKVDSelector,
    RandomSelector,
)

__all__ = [
    "BoundarySelector",
    "LayerProbe",
    "Selection",
    "SelectionTask",
    "Selector",
    "make_selection",
    "make_selector",
    "register_selector",
    "selector_names",
]

_SELECTORS: dict[str, type[Selector]] = {
    each.name: each for each in (RandomSelector, BoundarySelector, HKVDSelector, A3Selector)
}


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
    if _SELECTORS.get(selector.name, selector) is not selector:
        raise ConfigError(f"a selector named {selector.name!r} exists already; give yours another name")
    _SELECTORS[selector.name] = selector
    make_selector.cache_clear()
    return selector


def selector_names() -> tuple[str, ...]:
    """Return the names of all selectors."""
    return tuple(sorted(_SELECTORS))


# What is parsed may come from a client, and a long chain of operators takes more stack than there is.
_MOST_CHARACTERS = 500


@lru_cache(maxsize=256)
def make_selector(text: str) -> Selector:
    """Return the selector of a string like ``"hkvd"`` or ``"hkvd(check_layers=[1, 8])"``; `ConfigError` if it has no meaning."""
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"selector={text[:40]!r}... has {len(text)} characters, and may have {_MOST_CHARACTERS}")
    name, options = text.strip(), dict[str, Any]()
    if "(" in name:
        try:
            call = ast.parse(name, mode="eval").body
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
                raise ValueError("no call")
            name = call.func.id
            for keyword in call.keywords:
                value = keyword.value
                options[str(keyword.arg)] = value.id if isinstance(value, ast.Name) else ast.literal_eval(value)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(
                f'selector={text!r} cannot be read; write a name, or options after it as in "hkvd(check_layers=[1, 8])"'
            ) from error
    if name not in _SELECTORS:
        raise ConfigError(
            f"unknown selector {name!r}{did_you_mean(name, _SELECTORS)}; choose one of {', '.join(selector_names())}"
        )
    known = {each.name for each in fields(_SELECTORS[name])}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ConfigError(f"selector {name!r} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
    return _SELECTORS[name](**options)


def make_selection(blend: BlendConfig, layout: PromptLayout, num_layers: int) -> Selection:
    """Return what chooses the rows of a prompt that are recomputed."""
    budget = round(blend.recompute_ratio * layout.context_tokens)
    if budget == 0:
        # No selector is to spend anything on choosing nothing.
        return Selection(layout.context_rows[:0])
    return make_selector(blend.selector).begin(SelectionTask(layout, num_layers, budget))
