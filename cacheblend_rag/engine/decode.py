"""Decoding by the model's own ``generate``, one prompt or a padded batch of them: its options, and what ends each row."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import signature
from numbers import Integral
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils.generic import TransformersKwargs

from cacheblend_rag.config import BlendConfig, did_you_mean
from cacheblend_rag.engine.generation import GenerationResult, StopStrings
from cacheblend_rag.engine.request import Request, make_report
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.model import answering_first, past_adapters, unwrapped
from cacheblend_rag.stops import Spelling

__all__ = [
    "OBJECT_OPTIONS",
    "ROOM_FOR_OUTPUT",
    "Outputs",
    "Prefilled",
    "checked_options",
    "decode",
    "end_ids",
    "last_logits",
    "token_ids",
]

OBJECT_OPTIONS = ("stopping_criteria", "logits_processor")
"""Options that are objects, with a state of their own."""

ROOM_FOR_OUTPUT = 512
"""Tokens that a cache is given room for at once: a limit that is meant as "no limit" should not take memory."""

# What a checkpoint's own generation settings may ask for, and a blended prompt cannot have.
_NEUTRAL = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "cache_implementation": None,
    "use_cache": True,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "penalty_alpha": None,
    "dola_layers": None,
}

# Options of transformers' generate that would need the prompt's KV in another form than one sequence, computed at once.
_FOREIGN = {
    "input_ids": "the prompt is given as a BlendPrompt",
    "inputs": "the prompt is given as a BlendPrompt",
    "inputs_embeds": "the prompt is given as a BlendPrompt",
    "attention_mask": "a blended prompt is never padded",
    "position_ids": "positions are given in the BlendPrompt",
    "past_key_values": "the engine brings its own cache",
    "streamer": "use BlendEngine.stream",
    "assistant_model": "assisted decoding is not blended",
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
        raise ConfigError(f"{', '.join(settings)}: not options of generate; give {settings[0]} in {kind.__name__}")
    known = _known_options(type(unwrapped(model)))  # type: ignore[arg-type]  # a class is hashed by itself
    for name in options.keys() - known:
        raise ConfigError(f"unknown option {name} of generate{did_you_mean(name, known)}")
    for name, why in _FOREIGN.items():
        if options.get(name) is not None:
            raise ConfigError(f"generation option {name} cannot be used here: {why}")
    for name, neutral in _NEUTRAL.items():
        if options.get(name) not in (None, neutral):
            raise ConfigError(
                f"{name}={options[name]!r:.40} is not supported: a prompt is decoded as one sequence, over the engine's own "
                "cache; leave it out"
            )
    for name in OBJECT_OPTIONS:
        if not isinstance(options.get(name), list | tuple | None):
            raise ConfigError(
                f"{name} is the {type(options[name]).__name__} {options[name]!r:.40}; give a list of such objects"
            )
    return {name: value for name, value in options.items() if value is not None}


@lru_cache(maxsize=8)
def _known_options(kind: type[PreTrainedModel]) -> frozenset[str]:
    """Return the options of ``generate`` and of this package's calls for models of one class."""
    named = ("blend", "seed", "wait_s", "tokenizer", "assistant_tokenizer")
    calls = (GenerationMixin.generate, kind.forward, getattr(kind, "prepare_inputs_for_generation", kind.forward))
    passed_on = (name for call in calls for name in signature(call).parameters)
    return frozenset({*named, *_FOREIGN, *TransformersKwargs.__optional_keys__, *vars(GenerationConfig()), *passed_on})


def end_ids(model: Any, options: Mapping[str, Any] = MappingProxyType({})) -> tuple[int, ...]:
    """Return the tokens that end an answer, as options of ``generate`` say, or else the model's own settings."""
    asked = options.get("eos_token_id")
    return token_ids(model.generation_config.eos_token_id if asked is None else asked)


def token_ids(given: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the ids of a setting that is one, several or none."""
    return () if given is None else tuple(given) if isinstance(given, Sequence) else (given,)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prompts that were read, one a row, of the same width: what ``generate`` goes on from."""

    # Ids, and where they need them positions and a mask, `(rows, width)`.
    inputs: dict[str, torch.Tensor]
    # None: the model's own, empty.
    cache: Any
    # After each prompt, `(rows, vocab)`; None where the first forward is still to compute what the cache lacks.
    logits: torch.Tensor | None


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
    # Of models that compute all logits, the others are not kept.
    return logits[0, -count:].clone()


def decode(model: PreTrainedModel, tokenizer: Any, prompts: Prefilled, outputs: Outputs) -> None:
    """Decode the answers to prompts that were read."""
    # What ends a row by its text is watched here.
    taken = (*OBJECT_OPTIONS, "stop_strings")
    options = _NEUTRAL | {name: value for name, value in outputs.requests[0].options.items() if name not in taken}
    if options.get("pad_token_id") is None and model.generation_config.pad_token_id is None:
        options["pad_token_id"] = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    inputs, cache = dict(prompts.inputs), prompts.cache
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    injecting = nullcontext() if prompts.logits is None else answering_first(model, cache, prompts.logits)
    brought = any(each.options.get("logits_processor") for each in outputs.requests)
    with torch.no_grad(), injecting:
        output = model.generate(  # type: ignore[operator]  # transformers' stubs take it for a tensor
            **inputs,
            **({} if cache is None else {"past_key_values": cache}),
            max_new_tokens=max(outputs.limits),
            stopping_criteria=StoppingCriteriaList([outputs]),
            logits_processor=LogitsProcessorList([outputs.process] if brought else []),
            **options,
        )
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    outputs.finish(sequences[:, inputs["input_ids"].shape[1] :].tolist())


class Outputs(StoppingCriteria):
    """The answers to prompts that are decoded together: notes and shows their tokens, and ends each row for itself.

    `requests` differ in `limits`, the most tokens of each answer, and in options that are objects only. `ends` are the tokens
    that end an answer. Prompts stand right before the answers, each padded on the left to the longest.
    """

    def __init__(self, tokenizer: Any, requests: Sequence[Request], limits: Sequence[int], ends: Iterable[int]) -> None:
        self.requests = requests
        self.limits = limits
        self.errors: dict[int, Exception] = {}
        self._tokenizer = tokenizer
        # When each token was there, by `time.perf_counter`.
        self._times: list[float] = []
        self._counts: list[int | None] = [None] * len(requests)
        self._ids: list[tuple[int, ...]] = [()] * len(requests)
        spell = partial(lexer_of(tokenizer).text, skip_special_tokens=True)
        self._spellings = [None if each.show is None else Spelling(spell) for each in requests]
        width = max(len(each.prompt.layout) for each in requests)
        self._starts = [width - len(each.prompt.layout) for each in requests]
        strings = requests[0].options.get("stop_strings")
        self._criteria = [
            [*([StopStrings(tokenizer, strings)] if strings else []), *each.options.get("stopping_criteria", ())]
            for each in requests
        ]
        stops = [[each for each in criteria if isinstance(each, StopStrings)] for criteria in self._criteria]
        self._ends = [frozenset(map(int, ends)).union(*(each.ids for each in row)) for row in stops]

    def drop(self, row: int, error: Exception) -> None:
        """End a row by an error."""
        self.errors[row] = error
        self._counts[row] = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether each row is done."""
        newest = input_ids[:, -1].tolist()
        self._times.append(time.perf_counter())
        scores = scores if len(newest) == 1 else None
        for row, token in enumerate(newest):
            if self._counts[row] is None:
                try:
                    if self._is_done(row, token, input_ids, scores, **kwargs):
                        self._end(row)
                except Exception as error:  # handed to who asked for this row
                    self.drop(row, error)
        return torch.tensor([each is not None for each in self._counts], dtype=torch.bool, device=input_ids.device)

    def _is_done(self, row: int, token: int, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        request, own = self.requests[row], input_ids[row : row + 1, self._starts[row] :]
        self._show(row, token)
        # A list, since each may have to see every token.
        asked = [bool(each(own, scores, **kwargs)) for each in self._criteria[row]]
        # The interpreter waits for a stream's thread when it ends, and its answer is not read then.
        stopped = request.stop.is_set() or not threading.main_thread().is_alive()
        return stopped or any(asked) or token in self._ends[row] or len(self._times) >= self.limits[row]

    def _end(self, row: int) -> None:
        self._counts[row] = len(self._times)
        self._show(row, None)

    def _show(self, row: int, token: int | None) -> None:
        """Show what is certain of a row's text with its next token, or at its end what is left."""
        spelling, request = self._spellings[row], self.requests[row]
        if spelling is None or request.show is None:
            return
        if text := spelling.rest() if token is None else spelling.add(token):
            request.state.has_shown = True
            request.show(text)

    def process(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, ``(rows, vocab)``, as each row's own processors change them."""
        rows = []
        for row, start in enumerate(self._starts):
            own, changed = input_ids[row : row + 1, start:], scores[row : row + 1]
            try:
                if self._counts[row] is None:
                    for each in self.requests[row].options.get("logits_processor", ()):
                        changed = each(own, changed)
            except Exception as error:  # handed to who asked for this row
                self.drop(row, error)
                changed = scores[row : row + 1]
            rows.append(changed)
        return torch.cat(rows)

    def finish(self, rows: Sequence[Sequence[int]]) -> None:
        """Take the tokens that were generated, after which a row may have more than its answer."""
        for row, ids in enumerate(rows):
            if self._counts[row] is None:
                # Something else has ended them, such as `max_time`.
                self._end(row)
            self._ids[row] = self.requests[row].state.output_ids = tuple(ids[: self._counts[row]])

    def result(self, row: int, num_layers: int) -> GenerationResult | Exception:
        """Return a row's answer with its report, or the error that ended it."""
        if row in self.errors:
            return self.errors[row]
        request, ids = self.requests[row], self._ids[row]
        report = make_report(request, num_layers, ids, self._times)
        text = lexer_of(self._tokenizer).text(ids, skip_special_tokens=True)
        reason = "stop" if ids and ids[-1] in self._ends[row] else "length"
        return GenerationResult(text, ids, request.prompt.layout.token_ids, report, reason)
