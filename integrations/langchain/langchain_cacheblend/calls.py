"""One call of the engine: its options under the names of LangChain and transformers, what ends it early, what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from pydantic import BaseModel, Field, ValidationError
from transformers import GenerationConfig

from cacheblend_rag import BlendPrompt
from cacheblend_rag.chat.answer import Answer, Ending
from cacheblend_rag.chat.engines import offered
from cacheblend_rag.config import did_you_mean
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.report import CallReport

__all__ = [
    "Call",
    "DecodingFields",
    "checked_options",
    "explain",
    "generation_options",
    "info_of",
    "usage_of",
]

_KNOWN = frozenset(GenerationConfig().to_dict()) | {
    "logits_processor",
    "negative_prompt_ids",
    "prefix_allowed_tokens_fn",
    "seed",
    "stopping_criteria",
    "synced_gpus",
}


@dataclass(frozen=True)
class Call:
    """One call of the engine: the prompt, what ends the answer early, options of `BlendEngine.generate`."""

    prompt: BlendPrompt
    ending: Ending
    options: dict[str, Any] = field(default_factory=dict)


def info_of(answer: Answer) -> dict[str, Any]:
    """Return what goes into the response metadata."""
    return {"finish_reason": answer.finish_reason, "blend": CallReport.of(answer.report)}


def usage_of(answer: Answer) -> UsageMetadata:
    """Return the tokens used; ``cache_read`` counts the prompt tokens whose KV was there and was used unchanged."""
    report = answer.report
    usage: dict[str, Any] = {
        "input_tokens": report.prompt_tokens,
        "output_tokens": report.output_tokens,
        "total_tokens": report.prompt_tokens + report.output_tokens,
        "input_token_details": InputTokenDetails(cache_read=answer.cached_tokens),
    }
    if answer.thoughts:
        usage["output_token_details"] = OutputTokenDetails(reasoning=answer.reasoning_tokens)
    # On Python 3.10 type checkers take all of its keys for required.
    return cast(UsageMetadata, usage)


class DecodingFields(BaseModel):
    """Options of a model object that a call can give anew, and what they may be."""

    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop: list[Annotated[str, Field(min_length=1)]] | None = None
    timeout: float | None = Field(default=None, gt=0)


class _CallFields(DecodingFields):
    """Options of a call that are checked when it is made."""

    logits_processor: list[Any] | None = None
    stopping_criteria: list[Any] | None = None


def checked_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call, checked as those of a model object are; `ConfigError` if one is wrong."""
    named = {name: given[name] for name in _CallFields.model_fields if name in given}
    try:
        fields = _CallFields(**named)
    except ValidationError as error:
        raise ConfigError(explain(error)) from error
    return dict(given) | {name: getattr(fields, name) for name in named}


def generation_options(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge options into those of transformers' ``generate``; later layers win, None stands for "not given".

    `ConfigError` for unknown names.
    """
    options: dict[str, Any] = {}
    for layer in layers:
        for name, value in offered(layer).items():
            # What some callers say about how they call is not for the model.
            if value is not None and name != "stream":
                options["max_new_tokens" if name == "max_tokens" else name] = value
    unknown = sorted(options.keys() - _KNOWN)
    if unknown:
        names = ", ".join(f"{name}{did_you_mean(name, {*_KNOWN, 'max_tokens'})}" for name in unknown)
        raise ConfigError(
            f"unknown option {names}; give those of transformers' generate, or max_tokens, temperature, top_p, top_k, stop and "
            "timeout, and settings of blending as blend_config=BlendConfig(...)"
        )
    temperature = options.get("temperature")
    if temperature is not None and "do_sample" not in options:
        options["do_sample"] = temperature > 0
    if not options.get("do_sample", True):
        # transformers warns of settings that greedy decoding does not read.
        for name in ("temperature", "top_p", "top_k"):
            options.pop(name, None)
    return options


def explain(error: ValidationError) -> str:
    """Return what pydantic found wrong, in one line."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or 'fields'}: {item['msg']}, not {item['input']!r:.60}"
        for item in error.errors()
    )
