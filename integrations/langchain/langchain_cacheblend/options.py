"""What users give: an engine, and generation options by the names of LangChain and of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from transformers import GenerationConfig

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.errors import ConfigError

__all__ = [
    "DecodingFields",
    "check_engine",
    "check_options",
    "explain",
    "generation_options",
    "stop_strings",
    "with_objects",
]

# LangChain's name, where it differs from that of transformers.
_MAX_TOKENS = "max_tokens"
# Said by some callers about how they call, not to the model.
_NOT_FOR_THE_MODEL = ("stream",)
_KNOWN = frozenset(GenerationConfig().to_dict()) | {
    "logits_processor",
    "negative_prompt_ids",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "synced_gpus",
}


class DecodingFields(BaseModel):
    """Options of a model object that a call can give anew, and what they may be."""

    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)

    @staticmethod
    def checked(given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call with those among them checked as they are when an object is made."""
        named = {name: given[name] for name in DecodingFields.model_fields if name in given}
        try:
            return dict(given) | DecodingFields(**named).model_dump(include=set(named))
        except ValidationError as error:
            raise ConfigError(explain(error)) from error


def check_engine(engine: Any) -> None:
    """Raise `ConfigError` for what is no engine."""
    if not isinstance(engine, BlendEngine):
        held = isinstance(getattr(engine, "engine", None), BlendEngine)
        raise ConfigError(
            f"engine is a {type(engine).__name__}, no BlendEngine; give "
            + ("its .engine" if held else "that of the model, llm.engine")
        )


def check_options(options: Iterable[str]) -> None:
    """Raise `ConfigError` for names that no generation option has."""
    unknown = sorted(set(options) - _KNOWN)
    settings = [name for name in unknown if name in BlendConfig.kinds]
    if settings:
        raise ConfigError(
            f"{', '.join(settings)}: no options of an answer, but of {BlendConfig.kinds[settings[0]].__name__}, which "
            "engine_config and blend_config take"
        )
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: no generation option that this model knows; those of transformers' generate are known, and "
            "max_tokens, temperature, top_p, top_k, stop, timeout and blend_config"
        )


def generation_options(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge options into those of transformers' ``generate``; later layers win, None stands for "not given"."""
    options: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if value is not None and name not in _NOT_FOR_THE_MODEL:
                options["max_new_tokens" if name == _MAX_TOKENS else name] = value
    check_options(options)
    temperature = options.get("temperature")
    if temperature is not None and "do_sample" not in options:
        options["do_sample"] = temperature > 0
    if not options.get("do_sample", True):
        # transformers warns of settings that greedy decoding does not read.
        for name in ("temperature", "top_p", "top_k"):
            options.pop(name, None)
    return options


def stop_strings(stop: Iterable[str] | None) -> tuple[str, ...]:
    """Return the stop strings of a call; `ConfigError` if one is empty or no string, or they are a string themselves."""
    if isinstance(stop, str):
        raise ConfigError(f"stop is the string {stop[:40]!r}; give a list of strings")
    if not isinstance(stop, Iterable | None):
        raise ConfigError(f"stop={stop!r} is a {type(stop).__name__}; give a list of strings")
    ends = tuple(stop or ())
    for each in ends:
        if not isinstance(each, str):
            raise ConfigError(
                f"stop={list(ends)!r:.60} holds {each!r:.40}, a {type(each).__name__}; give a list of strings"
            )
        if not each:
            raise ConfigError("a stop string is empty; every text begins with it")
    return ends


def with_objects(options: Mapping[str, Any], name: str, *added: Any) -> list[Any]:
    """Return the objects that an option holds, and those added; `ConfigError` if the option is no list."""
    given = options.get(name) or ()
    if not isinstance(given, list | tuple):
        raise ConfigError(f"{name} is the {type(given).__name__} {given!r:.40}; give a list of such objects")
    return [*given, *added]


def explain(error: ValidationError) -> str:
    """Return what pydantic found wrong, in one line."""
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or 'fields'}: {item['msg']}" for item in error.errors())
