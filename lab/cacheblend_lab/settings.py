"""Settings by their names alone, of whatever kind: evaluations and benchmarks vary any of them."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any, TypedDict

from cacheblend_rag.config import BlendConfig, EngineConfig, Tuning
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.selection import make_selector, selector_names

__all__ = [
    "EngineSettings",
    "blend_settings",
    "engine_settings",
    "environment_without_settings",
    "settings_of",
]

_TUNING = frozenset(field.name for field in fields(Tuning))
_OPTIONS = frozenset(field.name for name in selector_names() for field in fields(make_selector(name)))


class EngineSettings(TypedDict):
    """The three arguments of `BlendEngine` that settings are given by."""

    config: EngineConfig
    blend: BlendConfig
    tuning: Tuning


def environment_without_settings() -> dict[str, str]:
    """Return this process's environment without any setting, for a process that is to have its own."""
    prefix = str(EngineConfig.model_config["env_prefix"])
    return {name: value for name, value in os.environ.items() if not name.startswith(prefix)}


def engine_settings(base: EngineSettings | None = None, **values: Any) -> EngineSettings:
    """Return the settings of an engine that differ in `values` from `base`, by default the environment's.

    By default nothing is taken over of earlier prompts, which would help what is measured. Options of selectors are those of the
    selector that is named, or that `base` has.
    """
    base = base or EngineSettings(config=EngineConfig(prefix_bytes=0), blend=BlendConfig(), tuning=Tuning())
    tuning = {name: value for name, value in values.items() if name in _TUNING}
    engine = {name: value for name, value in values.items() if EngineConfig.kinds.get(name) is EngineConfig}
    others = {name: value for name, value in values.items() if name not in tuning | engine}
    return EngineSettings(
        config=base["config"].replace(**engine),
        blend=blend_settings(base["blend"], **others),
        tuning=replace(base["tuning"], **tuning),
    )


def blend_settings(blend: BlendConfig, **values: Any) -> BlendConfig:
    """Return settings of blending that differ in some values, options of their selector among them."""
    options = {name: value for name, value in values.items() if name in _OPTIONS}
    blend = blend.replace(**{name: value for name, value in values.items() if name not in options})
    if not options:
        return blend
    selector = make_selector(blend.selector)
    unknown = sorted(options.keys() - {field.name for field in fields(selector)})
    if unknown:
        raise ConfigError(f"selector {selector.name!r} has no option {unknown[0]!r}")
    return blend.replace(selector=str(replace(selector, **options)))


def settings_of(engine: BlendEngine) -> EngineSettings:
    """Return the settings that an engine was made with."""
    return EngineSettings(config=engine.config, blend=engine.blend, tuning=engine.tuning)
