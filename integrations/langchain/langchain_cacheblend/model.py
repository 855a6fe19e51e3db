"""What the string model and the chat model have in common: an engine, its options, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.runnables.config import run_in_executor
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import GenerationConfig

from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, BlendReport, BlendStream, GenerationResult
from cacheblend_rag.chunk import Segment
from cacheblend_rag.errors import ConfigError
from langchain_cacheblend.batch import AnswersTogether
from langchain_cacheblend.catalog import catalog_of
from langchain_cacheblend.find import HEAD_CHARS
from langchain_cacheblend.stop import StopStrings, TextGate, cut

__all__ = ["Answer", "BlendModel", "Call"]

# LangChain's name, where it differs from that of transformers.
_MAX_TOKENS = "max_tokens"
# Said by some callers about how they call, not to the model.
_NOT_FOR_THE_MODEL = ("stream",)
_GENERATION_OPTIONS = frozenset(GenerationConfig().to_dict()) | {
    "logits_processor",
    "negative_prompt_ids",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "synced_gpus",
}


@dataclass(frozen=True)
class Answer:
    """An answer, cut at the first stop string.

    Attributes
    ----------
    text : str
        What to show.
    finish_reason : str
        "stop" at an end token or a stop string, else "length".
    report : BlendReport
        What it cost.
    """

    text: str
    finish_reason: str
    report: BlendReport

    def info(self) -> dict[str, Any]:
        """Return what goes into the response metadata."""
        return {"finish_reason": self.finish_reason, "blend": self.report.to_dict()}

    def usage(self) -> UsageMetadata:
        """Return the tokens used; ``cache_read`` are the prompt tokens whose stored KV was taken as it stood."""
        report = self.report
        reused = sum(chunk.tokens - chunk.recomputed_tokens for chunk in report.chunks if chunk.hit)
        return UsageMetadata(
            input_tokens=report.prompt_tokens,
            output_tokens=report.output_tokens,
            total_tokens=report.prompt_tokens + report.output_tokens,
            input_token_details=InputTokenDetails(cache_read=reused),
        )


@dataclass(frozen=True)
class Call:
    """One call of the engine: what is asked, and how the answer ends."""

    prompt: BlendPrompt
    stop: tuple[str, ...]
    options: dict[str, Any]


class BlendModel(AnswersTogether, BaseModel):
    """Fields and calls that `BlendLLM` and `ChatBlend` share.

    Parameters
    ----------
    model : str, optional
        A Hugging Face id, a folder, or "reference" for the small model that comes with cacheblend-rag.
    engine : BlendEngine, optional
        A ready-made engine instead of `model`.
    store : KVStore, str or Path, optional
        With `model`: where KV is kept, a folder for example; by default this process's RAM.
    model_kwargs : dict, optional
        With `model`: passed to ``AutoModelForCausalLM.from_pretrained``, as ``device_map`` or ``quantization_config``.
    blend_config : BlendConfig, optional
        Blending settings. With `model` also those the model is loaded with; with `engine` they apply to this object's calls only.
    max_tokens, temperature, top_p, top_k : optional
        Generation options by LangChain's names; a temperature of 0 decodes greedily. By default the model's own.
    stop : list of str, optional
        Strings that end an answer, which is shown without them.
    generation_kwargs : dict
        Further options of transformers' ``generate``.
    min_chunk_chars : int
        Stored chunks shorter than this are not looked for in prompts.

    Raises
    ------
    ConfigError
        If a name is unknown or a value has no meaning.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str
    engine: BlendEngine = Field(exclude=True, repr=False)
    blend_config: BlendConfig | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    stop: list[str] | None = None
    generation_kwargs: dict[str, Any] = Field(default_factory=dict)
    min_chunk_chars: int = Field(default=HEAD_CHARS, ge=HEAD_CHARS)

    def __init__(
        self,
        *,
        model: str | Path | None = None,
        engine: BlendEngine | None = None,
        blend_config: BlendConfig | None = None,
        store: Any = None,
        model_kwargs: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        # LangChain's classes swallow unknown names. And a misspelt one should not cost the loading of a model.
        unknown = sorted(fields.keys() - type(self).model_fields.keys())
        if unknown:
            raise ConfigError(
                f"{', '.join(unknown)}: {type(self).__name__} has no such parameter; generate's options go into generation_kwargs"
            )
        _check_options(fields.get("generation_kwargs") or {})
        loads = engine is None
        if engine is None:
            if model is None:
                raise ConfigError(
                    'name a model (model="reference", a Hugging Face id or a folder), or give a ready-made engine'
                )
            engine = BlendEngine.from_pretrained(model, config=blend_config, store=store, **(model_kwargs or {}))
        elif store is not None or model_kwargs:
            raise ConfigError(
                "store and model_kwargs belong to a model that is loaded; a ready-made engine has both already"
            )
        name = str(model) if model is not None else _name_of(engine)
        try:
            super().__init__(model=name, engine=engine, blend_config=blend_config, **fields)
        except ValidationError as error:
            if loads:
                engine.close()
            raise ConfigError(f"{type(self).__name__}: {_explain(error)}") from error

    # What is asked

    def _split(self, text: str) -> list[Segment]:
        return catalog_of(self.engine).split(self.engine, text, self.min_chunk_chars)

    def _call(self, prompt: BlendPrompt, stop: Sequence[str] | None, kwargs: dict[str, Any]) -> Call:
        """Merge the options of this object and of one call, which wins."""
        own = {name: getattr(self, name) for name in ("blend_config", _MAX_TOKENS, "temperature", "top_p", "top_k")}
        options: dict[str, Any] = {}
        for layer in (own, self.generation_kwargs, kwargs):
            for name, value in layer.items():
                if value is not None and name not in _NOT_FOR_THE_MODEL:
                    options["max_new_tokens" if name == _MAX_TOKENS else name] = value
        config = options.pop("blend_config", None)
        _check_options(options)
        temperature = options.get("temperature")
        if temperature is not None and "do_sample" not in options:
            options["do_sample"] = temperature > 0
        if not options.get("do_sample", True):
            # transformers warns of settings that greedy decoding does not read.
            for name in ("temperature", "top_p", "top_k"):
                options.pop(name, None)
        ends = tuple(stop if stop is not None else self.stop or ())
        if any(not each for each in ends):
            raise ConfigError("a stop string is empty; every text begins with it")
        if ends:
            criteria = StopStrings(self.engine.tokenizer, ends)
            options["stopping_criteria"] = [*options.get("stopping_criteria", ()), criteria]
        return Call(prompt, ends, options | {"config": config})

    # How it is answered

    def _answer(self, call: Call) -> Answer:
        return self._finished(call, self._ask(call))

    async def _aanswer(self, make_call: Callable[[], Call]) -> Answer:
        call = await run_in_executor(None, make_call)
        result = await self._aask_in_batch(call)
        if result is not None:
            return self._finished(call, result)
        # A stream, so that a cancelled task does not leave the engine busy with an answer that nobody waits for.
        stream = await run_in_executor(None, self.engine.stream, call.prompt, **call.options)
        try:
            return self._finished(call, await run_in_executor(None, stream.result))
        finally:
            stream.close()

    def _pieces(self, call: Call) -> Iterator[str | Answer]:
        """Yield the answer piece by piece, and at the end as a whole."""
        stream: BlendStream = self.engine.stream(call.prompt, **call.options)
        gate = TextGate(call.stop)
        try:
            for piece in stream:
                shown = gate.pass_on(piece)
                if shown:
                    yield shown
            rest = gate.rest()
            if rest:
                yield rest
            yield self._finished(call, stream.result())
        finally:
            stream.close()

    def _finished(self, call: Call, result: GenerationResult) -> Answer:
        text = cut(result.text, call.stop)
        ends = self.engine.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        at_end = len(text) < len(result.text) or result.token_ids[-1:] in [(end,) for end in ends]
        return Answer(text, "stop" if at_end else "length", result.report)

    # What LangChain asks about

    @property
    def _llm_type(self) -> str:
        return "cacheblend"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        names = (_MAX_TOKENS, "temperature", "top_p", "top_k", "stop", "generation_kwargs", "min_chunk_chars")
        config = self.blend_config or self.engine.config
        return {"model": self.model, "blend_config": config.model_dump(mode="json")} | {
            name: getattr(self, name) for name in names
        }

    def get_token_ids(self, text: str) -> list[int]:
        """Return the ids of a text by the model's own tokenizer, without special tokens added."""
        return list(self.engine.tokenizer(text, add_special_tokens=False)["input_ids"])


def _name_of(engine: BlendEngine) -> str:
    return engine.model.name_or_path or type(engine.model).__name__


def _check_options(options: dict[str, Any]) -> None:
    unknown = sorted(options.keys() - _GENERATION_OPTIONS)
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: no generation option that this model knows; those of transformers' generate are known, and "
            "max_tokens, temperature, top_p, top_k, stop and blend_config"
        )


def _explain(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or 'fields'}: {item['msg']}" for item in error.errors())
