"""One call of the engine: its options under the names of LangChain and transformers, what ends it early, what it returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from pydantic import BaseModel, Field, ValidationError
from transformers import GenerationConfig

from cacheblend_rag import BlendConfig, BlendPrompt
from cacheblend_rag.chat.answer import Answer, Ending, ModelCall
from cacheblend_rag.config import did_you_mean
from cacheblend_rag.engine import Engine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.extras import needs_extra
from cacheblend_rag.report import CallReport

__all__ = [
    "Call",
    "DecodingFields",
    "calls_made",
    "chosen_engine",
    "explain",
    "gathered_calls",
    "generation_options",
    "hinted",
    "info_of",
    "stop_strings",
    "usage_of",
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


# What LangChain's Hugging Face classes call it, and what it is here.
_ELSEWHERE = {
    "backend": "the model runs in this process, by transformers",
    "batch_size": "give max_concurrency in the config of batch()",
    "device": "give engine_config=EngineConfig(device=...)",
    "device_map": "give model_kwargs={'device_map': ...}",
    "llm": "give the name of its model as model, instead of ChatHuggingFace and HuggingFacePipeline",
    "max_new_tokens": "give max_tokens",
    "model_id": "give model",
    "model_name": "give model",
    "pipeline": "give the name of its model as model, or engine=BlendEngine(pipeline.model, pipeline.tokenizer)",
    "pipeline_kwargs": "give max_tokens, temperature, top_p and top_k themselves, and others as generation_kwargs",
    "repo_id": "give model",
    "task": "text is always generated",
    "tokenizer": "the model brings its tokenizer; for another, give engine=BlendEngine(model, tokenizer)",
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
    usage = UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=report.output_tokens,
        total_tokens=report.prompt_tokens + report.output_tokens,
        input_token_details=InputTokenDetails(cache_read=answer.cached_tokens),
    )
    if answer.thoughts:
        usage["output_token_details"] = OutputTokenDetails(reasoning=answer.reasoning_tokens)
    return usage


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


def chosen_engine(engine: Any, server: str | None) -> Engine:
    """Return the engine that is given, or that of the server whose address is given.

    Raises
    ------
    ConfigError
        If not exactly one is given, or what is given is none.
    """
    if engine is not None and server is not None:
        raise ConfigError("engine and server are both given; give only one of them")
    if server is not None:
        with needs_extra("serve", "server="):
            from cacheblend_serve.client.engine import served_engine

        return served_engine(server)
    if not isinstance(engine, Engine):
        held = isinstance(getattr(engine, "engine", None), Engine)
        raise ConfigError(
            f"engine is a {type(engine).__name__}, not an engine; give "
            + ("its .engine" if held else "that of the model, llm.engine, or server=, the address of one")
        )
    return engine


gathered_calls: ContextVar[list[ModelCall] | None] = ContextVar("cacheblend_gathered_calls", default=None)
"""List that models add their calls to, while `calls_made` gathers them."""


@contextmanager
def calls_made() -> Iterator[list[ModelCall]]:
    """Gather the calls of every model of ours that are made within a ``with`` block, in threads and tasks of its runs too."""
    calls: list[ModelCall] = []
    token = gathered_calls.set(calls)
    try:
        yield calls
    finally:
        gathered_calls.reset(token)


def hinted(names: Iterable[str], known: Iterable[str]) -> str:
    """Return names, with what to give instead: of those that LangChain's Hugging Face classes have, or of what is misspelt."""
    return ", ".join(
        f"{name} ({_ELSEWHERE[name]})" if name in _ELSEWHERE else f"{name}{did_you_mean(name, known)}" for name in names
    )


def generation_options(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge options into those of transformers' ``generate``; later layers win, None stands for "not given".

    `ConfigError` for unknown names.
    """
    options: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if value is not None and name not in _NOT_FOR_THE_MODEL:
                options["max_new_tokens" if name == _MAX_TOKENS else name] = value
    unknown = sorted(options.keys() - _KNOWN)
    settings = [name for name in unknown if name in BlendConfig.kinds]
    if settings:
        raise ConfigError(
            f"{', '.join(settings)}: settings of {BlendConfig.kinds[settings[0]].__name__}, not options of a call; give them in "
            "engine_config or blend_config"
        )
    if unknown:
        raise ConfigError(
            f"unknown option {hinted(unknown, {*_KNOWN, _MAX_TOKENS})}; give those of transformers' generate, or "
            "max_tokens, temperature, top_p, top_k, stop, timeout and blend_config"
        )
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
    """Return the objects that an option holds, and those added; `ConfigError` if the option is not a list."""
    given = options.get(name) or ()
    if not isinstance(given, list | tuple):
        raise ConfigError(f"{name} is the {type(given).__name__} {given!r:.40}; give a list of such objects")
    return [*given, *added]


def explain(error: ValidationError) -> str:
    """Return what pydantic found wrong, in one line."""
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or 'fields'}: {item['msg']}" for item in error.errors())
