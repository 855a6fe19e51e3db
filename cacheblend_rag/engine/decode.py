"""Decoding by the model's own ``generate``, one prompt or a padded batch of them: its options, and what ends each row."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import (
    Cache,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from cacheblend_rag.engine.lookup import Lookup, Pace, is_clear
from cacheblend_rag.engine.protocol import GenerationResult, StopStrings
from cacheblend_rag.engine.request import Request, make_report
from cacheblend_rag.fuse.mask import attend_folded
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.model import CACHE, KVCache, answering_first, past_adapters, replace_attention
from cacheblend_rag.stops import Spelling

__all__ = [
    "NEUTRAL",
    "OBJECT_OPTIONS",
    "ROOM_FOR_OUTPUT",
    "Outputs",
    "Prefilled",
    "decode",
    "last_logits",
    "token_ids",
]

OBJECT_OPTIONS = ("stopping_criteria", "logits_processor")
"""Options that are objects, with a state of their own."""

ROOM_FOR_OUTPUT = 512
"""Tokens that a cache is given room for at once: a limit that is meant as "no limit" should not take memory."""

NEUTRAL = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "cache_implementation": None,
    "use_cache": True,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "penalty_alpha": None,
    "dola_layers": None,
}
"""What a checkpoint's own generation settings may ask for, and a blended prompt cannot have."""


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
    options: dict[str, Any] = {} if cache is None else {CACHE: cache, "use_cache": True}
    if model._supports_logits_to_keep():  # type: ignore[operator]  # as generate asks
        options["logits_to_keep"] = count
    held = 0 if cache is None else cache.get_seq_length()
    # As generate does: what a cache begins with is not computed.
    inputs = {name: tensor[:, held:] for name, tensor in inputs.items()}
    logits: torch.Tensor = past_adapters(model)(**inputs, **options).logits
    # Of models that compute all logits, the others are not kept.
    return logits[0, -count:].clone()


# What a step of `generate` gives to a model, beside its cache; with anything else nothing is guessed.
_STEP = {"input_ids", "attention_mask", "position_ids", "logits_to_keep", "use_cache", "return_dict", CACHE}
# Of the greatest score, in steps of the dtype: how far two may be apart that a step of other rows gives in another order.
_ULPS = 4


class _Ahead:
    """Computes with a prompt's next token what its answer may go on with, and answers the forwards that come to it."""

    def __init__(self, cache: KVCache, lookup: Lookup, end: int, dtype: torch.dtype) -> None:
        self._cache, self._lookup, self._end = cache, lookup, end
        self._eps = torch.finfo(dtype).eps
        # Guesses, each with the logits after it.
        self._known: deque[tuple[int, torch.Tensor]] = deque()
        # Rows of the forward under way, and when it began.
        self._under_way: tuple[int, float] | None = None

    def __call__(self, forward: Callable[..., Any], **given: Any) -> Any:
        if self._under_way is not None:
            rows, began = self._under_way
            self._lookup.pace.note_step(rows, time.perf_counter() - began)
            self._under_way = None
        held, token = self._cache.get_seq_length(), int(given["input_ids"][0, -1])
        self._lookup.add(token)
        guess, logits = self._known.popleft() if self._known else (None, None)
        if logits is not None and guess == token and self._is_clear(logits):
            return self._answer(logits, held)
        self._known.clear()
        # What rounding may decide is computed alone.
        guesses = [] if guess == token else self._guess(given, self._end - held - 1)
        began = time.perf_counter()
        if guesses:
            rows = forward(**_with(given, guesses)).logits[0, -1 - len(guesses) :]
            if self._is_clear(rows[0]):
                self._known.extend(zip(guesses, rows[1:], strict=True))
                self._under_way = len(rows), began
                return self._answer(rows[0], held)
            self._cache.cut(held)
            return forward(**given)
        self._under_way = 1, began
        return forward(**given)

    def _guess(self, given: dict[str, Any], most: int) -> list[int]:
        is_plain = all(given[name] in (None, False) for name in given.keys() - _STEP)
        return self._lookup.guess(most) if is_plain and given["input_ids"].shape == (1, 1) else []

    def _is_clear(self, logits: torch.Tensor) -> bool:
        return is_clear(logits, _ULPS * self._eps * float(logits.abs().max()))

    def _answer(self, logits: torch.Tensor, held: int) -> CausalLMOutputWithPast:
        # The layers have the rows of guesses behind those that they count.
        self._cache.cut(held + 1)
        cache: Any = self._cache
        return CausalLMOutputWithPast(logits=logits[None, None], **{CACHE: cache})


def _with(given: dict[str, Any], guesses: Sequence[int]) -> dict[str, Any]:
    """Return what a step is given, with rows for guesses."""
    ids, count = given["input_ids"], len(guesses)
    wider = {**given, "input_ids": torch.cat([ids, ids.new_tensor([guesses])], dim=1)}
    if (mask := given.get("attention_mask")) is not None:
        wider["attention_mask"] = torch.cat([mask, mask.new_ones(1, count)], dim=1)
    if (places := given.get("position_ids")) is not None:
        wider["position_ids"] = places + torch.arange(count + 1, device=places.device)
    if "logits_to_keep" in given:
        wider["logits_to_keep"] = count + 1
    return wider


def decode(
    model: PreTrainedModel, tokenizer: Any, prompts: Prefilled, outputs: Outputs, pace: Pace | None = None
) -> None:
    """Decode the answers to prompts that were read; with `pace` those of a single one with what is guessed of it."""
    # What ends a row by its text is watched here.
    taken = (*OBJECT_OPTIONS, "stop_strings")
    options = NEUTRAL | {name: value for name, value in outputs.rows[0].request.options.items() if name not in taken}
    if options.get("pad_token_id") is None and model.generation_config.pad_token_id is None:
        options["pad_token_id"] = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    inputs, cache = dict(prompts.inputs), prompts.cache
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    injecting: AbstractContextManager[None] = nullcontext()
    if prompts.logits is not None:
        ahead = None
        if pace is not None:
            layout = outputs.rows[0].request.prompt.layout
            ahead = _Ahead(cache, Lookup(layout.token_ids, pace), len(layout) + outputs.limit, model.dtype)
        injecting = answering_first(model, cache, prompts.logits, ahead)
    brought = any(each.request.options.get("logits_processor") for each in outputs.rows)
    attending = replace_attention(attend_folded) if model.device.type == "cpu" else nullcontext()
    with torch.no_grad(), injecting, attending:
        output = model.generate(  # type: ignore[operator]  # transformers' stubs take it for a tensor
            **inputs,
            **({} if cache is None else {CACHE: cache}),
            max_new_tokens=outputs.limit,
            stopping_criteria=StoppingCriteriaList([outputs]),
            logits_processor=LogitsProcessorList([outputs.process] if brought else []),
            **options,
        )
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    outputs.finish(sequences[:, inputs["input_ids"].shape[1] :].tolist())


@dataclass(slots=True, eq=False)
class _Row:
    """An answer under way, whose prompt stands `start` tokens behind the padding's begin: what ends it, and what it is."""

    request: Request
    limit: int
    start: int
    criteria: list[StoppingCriteria]
    ends: frozenset[int]
    spelling: Spelling | None
    # How many tokens it has, once it has ended, and which; or what ended it.
    count: int | None = None
    ids: tuple[int, ...] = ()
    error: Exception | None = None

    def drop(self, error: Exception) -> None:
        """End it by an error."""
        self.count, self.error = 0, error

    def show(self, token: int | None) -> None:
        """Show what is certain of its text with its next token, or at its end what is left."""
        if self.spelling is None or self.request.show is None:
            return
        if text := self.spelling.rest() if token is None else self.spelling.add(token):
            self.request.state.has_shown = True
            self.request.show(text)


class Outputs(StoppingCriteria):
    """The answers to prompts that are decoded together: notes and shows their tokens, and ends each row for itself.

    `requests` differ in `limits`, the most tokens of each answer, and in options that are objects only. `ends` are the tokens
    that end an answer. Prompts stand right before the answers, each padded on the left to the longest.
    """

    def __init__(self, tokenizer: Any, requests: Sequence[Request], limits: Sequence[int], ends: Iterable[int]) -> None:
        self.limit = max(limits)
        self._tokenizer = tokenizer
        # When each token was there, by `time.perf_counter`.
        self._times: list[float] = []
        spell = partial(lexer_of(tokenizer).text, skip_special_tokens=True)
        width = max(len(each.prompt.layout) for each in requests)
        ends = frozenset(map(int, ends))
        self.rows: list[_Row] = []
        for request, limit in zip(requests, limits, strict=True):
            strings = request.options.get("stop_strings")
            own = [StopStrings(tokenizer, strings)] if strings else []
            criteria = [*own, *request.options.get("stopping_criteria", ())]
            stops = ends.union(*(each.ids for each in criteria if isinstance(each, StopStrings)))
            spelling = None if request.show is None else Spelling(spell)
            self.rows.append(_Row(request, limit, width - len(request.prompt.layout), criteria, stops, spelling))

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether each row is done."""
        newest = input_ids[:, -1].tolist()
        self._times.append(time.perf_counter())
        scores = scores if len(newest) == 1 else None
        # The interpreter waits for a stream's thread when it ends, and its answer is not read then.
        is_ending = not threading.main_thread().is_alive()
        for number, (row, token) in enumerate(zip(self.rows, newest, strict=True)):
            if row.count is not None:
                continue
            try:
                row.show(token)
                own = input_ids[number : number + 1, row.start :]
                # A list, since each may have to see every token.
                asked = [bool(each(own, scores, **kwargs)) for each in row.criteria]
                stopped = is_ending or row.request.stop.is_set()
                if stopped or any(asked) or token in row.ends or len(self._times) >= row.limit:
                    self._end(row)
            except Exception as error:  # handed to who asked for this row
                row.drop(error)
        return torch.tensor([row.count is not None for row in self.rows], dtype=torch.bool, device=input_ids.device)

    def _end(self, row: _Row) -> None:
        row.count = len(self._times)
        row.show(None)

    def process(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, ``(rows, vocab)``, as each row's own processors change them."""
        rows = []
        for number, row in enumerate(self.rows):
            own, changed = input_ids[number : number + 1, row.start :], scores[number : number + 1]
            try:
                if row.count is None:
                    for each in row.request.options.get("logits_processor", ()):
                        changed = each(own, changed)
            except Exception as error:  # handed to who asked for this row
                row.drop(error)
                changed = scores[number : number + 1]
            rows.append(changed)
        return torch.cat(rows)

    def finish(self, rows: Sequence[Sequence[int]]) -> None:
        """Take the tokens that were generated, after which a row may have more than its answer."""
        for row, ids in zip(self.rows, rows, strict=True):
            if row.count is None:
                # Something else has ended them, such as `max_time`.
                self._end(row)
            row.ids = row.request.state.output_ids = tuple(ids[: row.count])

    def result(self, number: int, num_layers: int) -> GenerationResult | Exception:
        """Return a row's answer with its report, or the error that ended it."""
        row = self.rows[number]
        if row.error is not None:
            return row.error
        report = make_report(row.request, num_layers, row.ids, self._times)
        text = lexer_of(self._tokenizer).text(row.ids, skip_special_tokens=True)
        reason = "stop" if row.ids and row.ids[-1] in row.ends else "length"
        return GenerationResult(text, row.ids, row.request.prompt.layout.token_ids, report, reason)
