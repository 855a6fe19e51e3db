"""Generation options, by the names of LangChain and of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import GenerationConfig

from cacheblend_rag.errors import ConfigError

__all__ = ["check_options", "generation_options", "stop_strings"]

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


def check_options(options: Iterable[str]) -> None:
    """Raise `ConfigError` for names that no generation option has."""
    unknown = sorted(set(options) - _KNOWN)
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: no generation option that this model knows; those of transformers' generate are known, and "
            "max_tokens, temperature, top_p, top_k, stop, timeout and blend_config"
        )


def generation_options(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge options into those of transformers' ``generate``.

    Parameters
    ----------
    *layers : mapping
        Options by name, the later ones winning; None stands for "not given".

    Returns
    -------
    dict
        The options.

    Raises
    ------
    ConfigError
        If a name is unknown.
    """
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
    """Return the stop strings of a call.

    Raises
    ------
    ConfigError
        If one is empty, or they are a string themselves.
    """
    if isinstance(stop, str):
        raise ConfigError(f"stop is the string {stop[:40]!r}; give a list of strings")
    ends = tuple(stop or ())
    if any(not each for each in ends):
        raise ConfigError("a stop string is empty; every text begins with it")
    return ends
