"""What the model's own ``generate``, which decodes, is given: options, and what ends and steers each row; and its result."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from inspect import signature
from numbers import Integral
from types import MappingProxyType
from typing import Any

import torch
from transformers import Cache, GenerationConfig, GenerationMixin, LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.utils.generic import TransformersKwargs

from cacheblend_rag.config import BlendConfig, did_you_mean
from cacheblend_rag.engine.generation import GenerationResult, StopStrings, TokenWatch
from cacheblend_rag.engine.request import Request, make_report
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.model import PaddedBatch, num_decoder_layers, past_adapters, unwrapped

__all__ = ["RowEnds", "RowProcessor", "checked_options", "complete_options", "last_logits", "make_result"]

# What a checkpoint's own generation settings may ask for, and a blended prompt cannot have.
_NEUTRAL = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "cache_implementation": None,
    "use_cache": True,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
}

# Options of transformers' generate that would need the prompt's KV in another form than one sequence, computed at once.
_FOREIGN = {
    "input_ids": "the prompt is given as a BlendPrompt",
    "inputs": "the prompt is given as a BlendPrompt",
    "inputs_embeds": "the prompt is given as a BlendPrompt",
    "attention_mask": "a blended prompt is never padded",
    "position_ids": "positions are given in the BlendPrompt",
    "past_key_values": "the engine brings its own cache",
    "cache_implementation": "the engine brings its own cache",
    "streamer": "use BlendEngine.stream",
    "assistant_model": "assisted decoding is not blended",
    "prompt_lookup_num_tokens": "assisted decoding is not blended",
    "adapter_names": "an engine serves the adapter that was active when it was made; make one for each adapter",
    "alora_offsets": "an activated LoRA is not blended",
    "prefill_chunk_size": "a blended prefill is one pass",
    "custom_generate": "the engine runs transformers' own decoding",
    "generation_config": "give its settings as keywords",
    "max_length": "use max_new_tokens, which does not count the prompt",
}


def checked_options(model: PreTrainedModel, max_new_tokens: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generation options that say something; refuse unknown ones, and those that blending rules out."""
    if not isinstance(max_new_tokens, Integral | None):
        raise ConfigError(f"max_new_tokens={max_new_tokens!r} is not a whole number; give 1 or more")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} leaves nothing to generate; use prefill, or give 1 or more")
    settings = sorted(options.keys() & BlendConfig.kinds.keys())
    if settings:
        kind = BlendConfig.kinds[settings[0]]
        raise ConfigError(
            f"{', '.join(settings)}: not options of generate but of {kind.__name__}: {settings[0]} is {kind.lifetime}"
        )
    known = _known_options(type(unwrapped(model)))  # type: ignore[arg-type]  # a class is hashed by itself
    for name in options.keys() - known:
        raise ConfigError(f"unknown option {name} of generate{did_you_mean(name, known)}")
    for name, why in _FOREIGN.items():
        if options.get(name) is not None:
            raise ConfigError(f"generation option {name} cannot be used here: {why}")
    for name in ("num_beams", "num_return_sequences"):
        if (options.get(name) or 1) != 1:
            raise ConfigError(
                f"{name}={options[name]} is not supported: a blended prompt is decoded as one sequence; leave it at 1"
            )
    for name in ("stopping_criteria", "logits_processor"):
        if not isinstance(options.get(name), list | tuple | None):
            raise ConfigError(
                f"{name} is the {type(options[name]).__name__} {options[name]!r:.40}; give a list of such objects"
            )
    if options.get("use_cache") is False:
        raise ConfigError("use_cache=False contradicts blending; leave it out")
    return {name: value for name, value in options.items() if value is not None}


@lru_cache(maxsize=8)
def _known_options(kind: type[PreTrainedModel]) -> frozenset[str]:
    """Return the options of ``generate`` and of this package's calls for models of one class."""
    named = ("blend", "wait_s", "tokenizer", "assistant_tokenizer")
    calls = (GenerationMixin.generate, kind.forward, getattr(kind, "prepare_inputs_for_generation", kind.forward))
    passed_on = (name for call in calls for name in signature(call).parameters)
    return frozenset({*named, *_FOREIGN, *TransformersKwargs.__optional_keys__, *vars(GenerationConfig()), *passed_on})


def complete_options(model: PreTrainedModel, tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return options of ``generate`` with those that a blended prompt needs."""
    options = dict(_NEUTRAL) | options
    if strings := options.pop("stop_strings", None):
        options["stopping_criteria"] = [*options.get("stopping_criteria", ()), StopStrings(tokenizer, strings)]
    if options.get("pad_token_id") is None and model.generation_config.pad_token_id is None:
        options["pad_token_id"] = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return options


def end_ids(model: Any, options: Mapping[str, Any] = MappingProxyType({})) -> tuple[int, ...]:
    """Return the tokens that end an answer, as options of ``generate`` say, or else the model's own settings."""
    asked = options.get("eos_token_id")
    return token_ids(model.generation_config.eos_token_id if asked is None else asked)


def token_ids(given: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the ids of a setting that is one, several or none."""
    return () if given is None else tuple(given) if isinstance(given, Sequence) else (given,)


def make_result(
    model: PreTrainedModel, tokenizer: Any, request: Request, token_ids: tuple[int, ...], watch: TokenWatch
) -> GenerationResult:
    """Return the answer to a prompt, whose tokens a watch has timed, with its report."""
    report = make_report(request, num_decoder_layers(model), token_ids, watch.times)
    text = lexer_of(tokenizer).text(token_ids, skip_special_tokens=True)
    options = complete_options(model, tokenizer, request.options)
    stops = (each for each in options.get("stopping_criteria", ()) if isinstance(each, StopStrings))
    ends = {*end_ids(model, options), *(id for each in stops for id in each.ids)}
    reason = "stop" if token_ids and token_ids[-1] in ends else "length"
    return GenerationResult(text, token_ids, request.prompt.layout.token_ids, report, reason)


def last_logits(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Cache | None, count: int = 1
) -> torch.Tensor:
    """Prefill over a cache that may hold its beginning, or the model's own; return the last ``(count, vocab)`` logits."""
    options: dict[str, Any] = {} if cache is None else {"past_key_values": cache, "use_cache": True}
    if model._supports_logits_to_keep():  # type: ignore[operator]  # as generate asks
        options["logits_to_keep"] = count
    held = 0 if cache is None else cache.get_seq_length()
    # As generate does: what a cache begins with is not computed.
    inputs = {name: tensor[:, held:] for name, tensor in inputs.items()}
    logits: torch.Tensor = past_adapters(model)(**inputs, **options).logits
    return logits[0, -count:]


class RowEnds(TokenWatch):
    """Ends each row of a padded batch by a measure of its own, hands its tokens on, and counts them."""

    def __init__(
        self,
        batch: PaddedBatch,
        requests: Sequence[Request],
        limits: Sequence[int],
        end_ids: Collection[int],
        shared: Sequence[StoppingCriteria],
    ) -> None:
        super().__init__(threading.Event())
        self._requests = requests
        self.errors: dict[int, Exception] = {}
        self._batch = batch
        self._limits = limits
        self._end_ids = frozenset(map(int, end_ids))
        self._shared = shared
        self._counts: list[int | None] = [None] * len(limits)

    def count(self, row: int) -> int:
        """Return the tokens of a row's answer, once the batch has ended."""
        ended = self._counts[row]
        return len(self.times) if ended is None else ended

    def has_ended(self, row: int) -> bool:
        """Whether nothing more is wanted of a row."""
        return self._counts[row] is not None or row in self.errors

    def drop(self, row: int, error: Exception | None = None) -> None:
        """End a row before its first token."""
        self._counts[row] = 0
        if error is not None:
            self.errors[row] = error

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether each row is done."""
        ended = self.note()
        count = input_ids.shape[1] - self._batch.width
        newest = input_ids[:, -1].tolist()
        together = [each(input_ids, scores, **kwargs).tolist() for each in self._shared]
        for row, start in enumerate(self._batch.starts):
            if self._counts[row] is not None:
                continue
            own, request = input_ids[row : row + 1, start:], self._requests[row]
            streamer = request.streamer
            try:
                if streamer is not None:
                    streamer.put(input_ids[row, -1:].cpu())
                is_done = (
                    ended
                    or request.stop.is_set()
                    or count >= self._limits[row]
                    or newest[row] in self._end_ids
                    or any(done[row] for done in together)
                    # A list, since each may have to see every token.
                    or any([bool(each(own, None, **kwargs)) for each in request.options.get("stopping_criteria", ())])
                )
                if is_done and streamer is not None:
                    streamer.end()
            except Exception as error:  # handed to who asked for this row
                self.errors[row], is_done = error, True
            if is_done or row in self.errors:
                self._counts[row] = count
        done = [each is not None for each in self._counts]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)


class RowProcessor(LogitsProcessor):
    """Applies each row's own logits processors to it, as to a batch of one without padding, until it has ended."""

    def __init__(self, starts: Sequence[int], requests: Sequence[Request], ends: RowEnds) -> None:
        self._starts = starts
        self._requests = requests
        self._ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, ``(rows, vocab)``, as the processors change them."""
        rows = []
        for row, start in enumerate(self._starts):
            own, changed = input_ids[row : row + 1, start:], scores[row : row + 1]
            try:
                if not self._ends.has_ended(row):
                    for each in self._requests[row].options.get("logits_processor", ()):
                        changed = each(own, changed)
            except Exception as error:  # handed to who asked for this row
                self._ends.errors[row], changed = error, scores[row : row + 1]
            rows.append(changed)
        return torch.cat(rows)
