"""The methods of an evaluation, by the names that people write and tables show."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cacheblend_lab.settings import setting_names
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.selection import selector_names

__all__ = [
    "FULL",
    "NO_CONTEXT",
    "WHOLE_WAYS",
    "EvalMethod",
    "grid_methods",
    "order_methods",
    "parse_method",
    "parse_methods",
    "split_names",
]

FULL = "full"
NO_CONTEXT = "no_context"
_NOTHING_RECOMPUTED: dict[str, Any] = {"selector": "none", "recompute_ratio": 0.0}
_NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    FULL: (FULL, {}),
    # Without any chunk: what the model knows by itself.
    NO_CONTEXT: (NO_CONTEXT, {}),
    "prefix": ("prefix", {}),
    "map_reduce": ("map_reduce", {}),
    "map_rerank": ("map_rerank", {}),
    # Reuse of stored KV at its new positions.
    "reuse": ("blend", _NOTHING_RECOMPUTED),
    # Chunks as modules of a schema, each with its place; the words around them are computed (Prompt Cache, section 5.1).
    "prompt_cache": ("prompt_cache", _NOTHING_RECOMPUTED),
}
"""The methods that go by a name of their own: how each answers (`cacheblend_lab.eval.ways`), and its settings."""
WHOLE_WAYS = tuple(way for way, settings in _NAMED.values() if not settings)
"""Ways to answer that blend nothing."""

_RANDOM = "random"


@dataclass(frozen=True)
class EvalMethod:
    """A way to answer questions.

    Attributes
    ----------
    name : str
        What tables show; unique in an evaluation.
    way : str
        "full", "no_context", "prefix", "map_reduce", "map_rerank", "prompt_cache" or "blend" (`cacheblend_lab.eval.ways`).
    overrides : mapping
        Settings (`BlendConfig`) that differ from the engine's. Those that are settled when an engine is made get an engine of
        their own on the same model.
    charge : float, optional
        The `charged_ratio` that its ratio is to be found for, question by question.
    equal_to : str, optional
        The name of the method whose `charged_ratio` is its ratio, question by question.
    """

    name: str
    way: str = "blend"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    charge: float | None = None
    equal_to: str | None = None

    def settings(self) -> dict[str, Any]:
        """Return the overrides, with what blending every prompt takes; empty for a method that blends nothing."""
        if self.way in WHOLE_WAYS:
            return dict(self.overrides)
        return {"enabled": True} | dict(self.overrides)

    def describe(self) -> dict[str, Any]:
        """Return the method as plain values: what a journal pins."""
        return asdict(self) | {"overrides": dict(sorted(self.overrides.items()))}


def parse_method(text: str) -> EvalMethod:
    """Return the method that a text names.

    Parameters
    ----------
    text : str
        "full", "no_context", "prefix", "reuse", "prompt_cache", "map_reduce", "map_rerank"; a selector and a ratio
        ("hkvd 0.15"); a selector and a charge ("hkvd @0.15"); or "random = hkvd 0.15", which is random at the charge of the
        method named after the sign. Settings may follow, as in ``hkvd 0.15 companions=neutral check_layers=[1,2]``; values are
        read as JSON, else as text.

    Raises
    ------
    ConfigError
        If it names none, or an unknown setting.
    """
    text = " ".join(text.split())
    if text.startswith(f"{_RANDOM} = "):
        target = parse_method(text.removeprefix(f"{_RANDOM} = "))
        if target.way != "blend":
            raise ConfigError(
                f"method {text!r} has no meaning: {target.name} blends nothing, so random has no such charge"
            )
        settled = {name: value for name, value in target.overrides.items() if name == "companions"}
        overrides = {"selector": _RANDOM} | settled
        return EvalMethod(f"{_RANDOM} = {target.name}", overrides=overrides, equal_to=target.name)
    words = text.split(" ")
    settings = dict(_setting(word, text) for word in words if "=" in word)
    plain = [word for word in words if "=" not in word]
    first = plain[0] if plain else ""
    if first in _NAMED and len(plain) == 1:
        way, overrides = _NAMED[first]
        if way in WHOLE_WAYS and settings:
            raise ConfigError(f"method {text!r} has settings, but {first} blends nothing; leave them out")
        return EvalMethod(text, way, overrides | settings)
    if first not in selector_names():
        raise ConfigError(
            f"method {text!r} is unknown; write {', '.join(_NAMED)}, or one of the selectors "
            f"{', '.join(selector_names())} with a ratio (hkvd 0.15) or a charge (hkvd @0.15)"
        )
    if len(plain) != 2:
        raise ConfigError(
            f"method {text!r} wants a ratio or a charge after its selector, as in '{first} 0.15', '{first} @0.15'"
        )
    amount = _share(plain[1].removeprefix("@"), text)
    if plain[1].startswith("@"):
        return EvalMethod(text, overrides={"selector": first} | settings, charge=amount)
    return EvalMethod(text, overrides={"selector": first, "recompute_ratio": amount} | settings)


def parse_methods(text: str) -> tuple[EvalMethod, ...]:
    """Return the methods of a list that is separated by commas; commas inside brackets separate nothing."""
    return tuple(parse_method(part) for part in split_names(text))


def split_names(text: str) -> list[str]:
    """Return the names of a list that is separated by commas, empty ones left out; commas inside brackets separate nothing."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def grid_methods(
    selectors: Sequence[str],
    ratios: Sequence[float] = (),
    charges: Sequence[float] = (),
    codecs: Sequence[str] = (),
) -> tuple[EvalMethod, ...]:
    """Return selectors at ratios, then at charges, each beside random.

    At each ratio, random stands at the charge of each selector on that question too. Each codec adds a row for each selector and
    ratio, whose stored KV is packed by it.
    """
    names = []
    others = [name for name in dict.fromkeys(selectors) if name != _RANDOM]
    for ratio in dict.fromkeys(ratios):
        names.append(f"{_RANDOM} {ratio:g}")
        for selector in others:
            name = f"{selector} {ratio:g}"
            names += [name, f"{_RANDOM} = {name}", *(f"{name} ram_codec={codec}" for codec in dict.fromkeys(codecs))]
    for charge in dict.fromkeys(charges):
        names += [f"{_RANDOM} @{charge:g}", *(f"{selector} @{charge:g}" for selector in others)]
    return tuple(parse_method(name) for name in names)


def order_methods(methods: Sequence[EvalMethod]) -> tuple[EvalMethod, ...]:
    """Return the methods as they are asked: each once, full prefill first, and none before the one whose charge it takes."""
    chosen: dict[str, EvalMethod] = {FULL: parse_method(FULL)}
    waiting: list[EvalMethod] = []
    for method in methods:
        known = chosen.get(method.name)
        if known is not None and known.describe() != method.describe():
            raise ConfigError(
                f"two methods are named {method.name!r}, with different settings; name one of them otherwise"
            )
        chosen[method.name] = method
    for method in chosen.values():
        if method.equal_to is not None and method.equal_to not in chosen:
            raise ConfigError(
                f"method {method.name!r} needs the charge of {method.equal_to!r}, which is not among the methods; add it"
            )
        waiting.append(method)
    ordered: list[EvalMethod] = []
    while waiting:
        ready = next((m for m in waiting if m.equal_to is None or any(m.equal_to == d.name for d in ordered)), None)
        if ready is None:
            names = ", ".join(method.name for method in waiting)
            raise ConfigError(f"the methods {names} take their charge from each other; let one have a ratio of its own")
        waiting.remove(ready)
        ordered.append(ready)
    return tuple(ordered)


def _setting(word: str, text: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    if name not in setting_names():
        known = ", ".join(setting_names())
        raise ConfigError(f"method {text!r} has the unknown setting {name!r}; the settings are {known}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _share(text: str, method: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise ConfigError(f"method {method!r}: {text!r} must be a number from 0 (plain reuse) to 1 (full prefill)")
    return share
