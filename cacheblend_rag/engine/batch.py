"""Decoding prompts together: those of one call and those of others that wait, in padded batches, as far as that is exact."""

from __future__ import annotations

import copy
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from inspect import signature
from numbers import Integral
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.utils.generic import TransformersKwargs

from cacheblend_rag.config import BlendConfig, Tuning, did_you_mean
from cacheblend_rag.engine.backend import Backend
from cacheblend_rag.engine.decode import NEUTRAL, OBJECT_OPTIONS, ROOM_FOR_OUTPUT, Outputs, Prefilled, decode, token_ids
from cacheblend_rag.engine.lookup import Pace
from cacheblend_rag.engine.protocol import GenerationResult
from cacheblend_rag.engine.request import Request
from cacheblend_rag.engine.seeded import seeded
from cacheblend_rag.errors import CacheBlendError, ConfigError, UnsupportedModelError
from cacheblend_rag.fuse.selfcheck import check_batching
from cacheblend_rag.model import Decoder, PaddedBatch, unwrapped

__all__ = ["BatchingBackend", "options_of_each"]

logger = logging.getLogger(__name__)

# Options of transformers' generate that mean the same for a row of a padded batch as for a prompt of its own.
_BY_ROW = frozenset(
    """
    bad_words_ids begin_suppress_tokens bos_token_id cache_implementation do_sample eos_token_id epsilon_cutoff eta_cutoff
    max_new_tokens min_new_tokens min_p num_beams num_return_sequences pad_token_id remove_invalid_values renormalize_logits
    repetition_penalty stop_strings suppress_tokens temperature tokenizer top_h top_k top_p typical_p use_cache
    """.split()
).union(OBJECT_OPTIONS)  # of which every row gets its own
_DEFAULT_NEW_TOKENS = 256
# What a checkpoint's generation settings may say besides, to no effect here.
_WITHOUT_EFFECT = frozenset({"max_length", "transformers_version"})
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


class BatchingBackend(Backend):
    """A model of transformers that answers prompts, those that may be decoded together in batches of like length."""

    model: PreTrainedModel
    decoder: Decoder | None
    # Why no prompts may be decoded together, once that was tried.
    _refused: str | None = None

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self._batch_tokens = tuning.decode_batch_tokens
        self._tries_batching = tuning.self_check
        self.pace = Pace(tuning.lookup_tokens)

    @abstractmethod
    def prefill(self, request: Request, headroom: int, logits_to_keep: int = 1) -> AbstractContextManager[Prefilled]:
        """Have the model read a prompt, and have it for the ``with`` block, in which up to `headroom` tokens follow."""

    @abstractmethod
    def encode_misses(self, requests: Sequence[Request]) -> None:
        """Encode in one go what prompts lack of stored KV."""

    def check_options(self, max_new_tokens: int | None, options: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(max_new_tokens, Integral | None):
            raise ConfigError(f"max_new_tokens={max_new_tokens!r} is not a whole number; give 1 or more")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ConfigError(
                f"max_new_tokens={max_new_tokens} leaves nothing to generate; use prefill, or give 1 or more"
            )
        settings = sorted(options.keys() & BlendConfig.kinds.keys())
        if settings:
            kind = BlendConfig.kinds[settings[0]]
            raise ConfigError(f"{', '.join(settings)}: not options of generate; give {settings[0]} in {kind.__name__}")
        known = _known_options(type(unwrapped(self.model)))  # type: ignore[arg-type]  # a class is hashed by itself
        for name in options.keys() - known:
            raise ConfigError(f"unknown option {name} of generate{did_you_mean(name, known)}")
        for name, why in _FOREIGN.items():
            if options.get(name) is not None:
                raise ConfigError(f"generation option {name} cannot be used here: {why}")
        for name, neutral in NEUTRAL.items():
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
        said = {name: value for name, value in options.items() if value is not None}
        return seeded(said, self.model.generation_config)

    def answer(
        self, requests: Sequence[Request], batch_size: int | None = None
    ) -> Iterator[tuple[Request, GenerationResult | Exception]]:
        """Answer the prompts of one call, and with them those of others that wait, each in its thread."""
        scheduler, is_single = self.scheduler, len(requests) == 1
        deadline = min((each.deadline for each in requests), default=math.inf)
        left = sorted(requests, key=lambda each: len(each.prompt.layout), reverse=True)
        while left:
            is_nested = scheduler.is_mine
            try:
                # A single prompt may be picked by who has the model.
                place = (left[0].supply, left[0]) if is_single else None
                if not scheduler.take(place, deadline, lambda: left[0].is_given_up):
                    yield left[0], _outcome(left[0])
                    return
            except CacheBlendError as error:
                yield from ((request, error) for request in left)
                return
            deadline = math.inf
            try:
                if len(left) == len(requests) > 1 and batch_size != 1:
                    reason = next(filter(None, map(self._alone_reason, left)), None)
                    for request in left:
                        request.state.figures["alone_reason"] = reason
                    batch_size = batch_size if reason is None else 1
                group = [left.pop(0)]
                if left:
                    self._fill(group, left, batch_size)
                own = len(group)
                answers = self._answers(group, own, joins=is_single and not is_nested)
            finally:
                scheduler.leave()
            yield from zip(group[:own], answers[:own], strict=True)

    def _answers(self, group: list[Request], own: int, *, joins: bool) -> Sequence[GenerationResult | Exception]:
        """Answer prompts together, of which the first are of this call; others that wait may join, and get their answers here."""
        try:
            if joins and self.scheduler.queue:
                self._join(group)
            answers = self._together(group)
        except BaseException as error:
            for other in group[own:]:
                why = f"the call that this one was answered with was ended by {type(error).__name__}; try again"
                other.answer.set_result(CacheBlendError(why))
            raise
        for other, answer in zip(group[own:], answers[own:], strict=True):
            other.answer.set_result(answer)
        return answers

    def _join(self, group: list[Request]) -> None:
        """Take out of the line those that may be decoded with a prompt, the oldest first, as far as there is room."""
        [first] = group
        line = (each for each in list(self.scheduler.queue) if isinstance(each, tuple))
        waiting = [request for supply, request in line if supply is first.supply]
        if waiting and self._may_join(first, first):
            self._fill(group, [each for each in waiting if self._may_join(each, first)], None, picks=True)

    def _may_join(self, request: Request, first: Request) -> bool:
        """Whether a call may be decoded with another caller's."""
        mine, theirs = (
            {name: (type(value), value) for name, value in each.options.items() if name not in OBJECT_OPTIONS}
            for each in (request, first)
        )
        # Objects that are not ours could hold up the others.
        brought = [each for name in OBJECT_OPTIONS for each in request.options.get(name) or ()]
        if request.is_given_up or not all(getattr(each, "is_of_one_answer", False) for each in brought):
            return False
        try:
            return mine == theirs and self._alone_reason(request) is None
        except Exception:  # of its own options; it is told when its turn comes
            return False

    def _fill(self, group: list[Request], waiting: list[Request], most: int | None, picks: bool = False) -> None:
        """Move those that wait into a group, as far as there is room: a row that has ended goes on to the longest one's end."""
        width, end, limit = map(max, zip(*map(self._sizes, group), strict=True))
        window = math.inf if self.window is None else self.window
        for other in list(waiting):
            sizes = self._sizes(other)
            wider, later, longer = max(width, sizes[0]), max(end, sizes[1]), max(limit, sizes[2])
            fits = later + longer <= window and (len(group) + 1) * (wider + longer) <= self._batch_tokens
            # It may have left the line meanwhile.
            if fits and len(group) != most and (not picks or self.scheduler.pick((other.supply, other))):
                width, end, limit = wider, later, longer
                waiting.remove(other)
                group.append(other)

    def _sizes(self, request: Request) -> tuple[int, int, int]:
        """Return the tokens of a prompt, the position after it, and the most tokens of its answer, within the model's window."""
        own: Any = self.model.generation_config
        limit, layout = int(request.max_new_tokens or own.max_new_tokens or _DEFAULT_NEW_TOKENS), request.prompt.layout
        end = layout.end_position
        limit = limit if self.window is None else min(limit, self.window - max(len(layout), end))
        return len(layout), end, limit

    def _together(self, requests: Sequence[Request]) -> Sequence[GenerationResult | Exception]:
        """Answer prompts in one batch, whose options differ in objects and limits only; one by one if that fails."""
        try:
            return self._batch(requests)
        except Exception as error:  # of a single prompt its own; whose fault it is otherwise, they find out one by one
            if len(requests) == 1:
                return [error]
            # Its frames hold what the batch held, which is to be gone before anything else is computed.
            failure = error.with_traceback(None)
        answers: list[GenerationResult | Exception] = []
        for request in requests:
            if request.state.has_shown:
                # What was read of it cannot be begun anew.
                answers.append(CacheBlendError(f"an answer that had begun was cut off: {failure}; try again"))
            else:
                answers.extend(self._together([request]))
        lacks_memory = isinstance(failure, torch.OutOfMemoryError)
        # What lacks memory alone as well is not too many prompts.
        if lacks_memory and not any(isinstance(each, torch.OutOfMemoryError) for each in answers):
            self._batch_tokens //= 2
            logger.warning(
                "not enough memory to decode %d prompts together; from now on %d tokens at most, with their answers, are",
                len(requests),
                self._batch_tokens,
            )
        return answers

    def _batch(self, requests: Sequence[Request]) -> Sequence[GenerationResult | Exception]:
        """Answer prompts: a single one goes on in its own cache, several in one padded batch."""
        limits = [self._sizes(request)[2] for request in requests]
        ends = requests[0].options.get("eos_token_id", self.model.generation_config.eos_token_id)
        outputs = Outputs(self.tokenizer, requests, limits, token_ids(ends))
        if len(requests) == 1:
            with self.prefill(requests[0], limits[0]) as prefilled:
                decode(self.model, self.tokenizer, prefilled, outputs, self._pace_of(requests[0]))
        elif (prompts := self._prefill_all(requests, outputs)) is not None:
            decode(self.model, self.tokenizer, prompts, outputs)
        for request in requests:
            request.state.figures["batch_size"] = len(requests)
        return [outputs.result(row, self.num_layers) for row in range(len(requests))]

    def _pace_of(self, request: Request) -> Pace | None:
        """Return the model's pace where several rows of a prompt may be decoded at once."""
        decoder = self.decoder
        is_plain = decoder is not None and decoder.rope_reach is None and attached_reason(request) is None
        return self.pace if is_plain else None

    def _prefill_all(self, requests: Sequence[Request], outputs: Outputs) -> Prefilled | None:
        """Prefill prompts one after the other into a padded batch; one that fails or was given up is dropped."""
        layouts = [request.prompt.layout for request in requests]
        batch = PaddedBatch(
            [layout.token_ids for layout in layouts],
            [layout.positions for layout in layouts],
            min(outputs.limit, ROOM_FOR_OUTPUT),
        )
        self.encode_misses([request for request in requests if not request.is_given_up])
        for row, request in enumerate(requests):
            try:
                with self.prefill(request, 0) as prefilled:
                    assert prefilled.logits is not None
                    batch.take(row, prefilled.cache, prefilled.logits[-1])
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # handed to who asked for this row
                outputs.rows[row].drop(error)
            request.state.forward_ended = time.perf_counter()
        if all(row.error for row in outputs.rows):
            return None
        return Prefilled(*batch.filled(self.model.device))

    def _alone_reason(self, request: Request) -> str | None:
        """Return why a prompt cannot be decoded together with others, or None; asked by who has the model."""
        decoder = self.decoder
        if decoder is None:
            return "the model cannot be blended, and may not decode several prompts as it decodes one"
        if decoder.rope_reach is not None:
            return "the rotary frequencies of the model depend on the longest prompt that it reads"
        if (reason := attached_reason(request)) is not None:
            return reason
        own: dict[str, Any] = self.model.generation_config.to_diff_dict()
        given = {name: value for name, value in request.options.items() if value is not None}
        for name, value in (own | given).items():
            # What is 0, False or empty is switched off.
            if value and name not in _BY_ROW | _WITHOUT_EFFECT and not name.startswith("_"):
                return f"the generation option {name}={value!r} may read the padding of a batch"
        if self._tries_batching:
            try:
                check_batching(decoder)
            except UnsupportedModelError as error:
                self._refused = str(error)
            self._tries_batching = False
        return self._refused


@lru_cache(maxsize=8)
def _known_options(kind: type[PreTrainedModel]) -> frozenset[str]:
    """Return the options of ``generate`` and of this package's calls for models of one class."""
    named = ("blend", "seed", "wait_s", "tokenizer", "assistant_tokenizer")
    calls = (GenerationMixin.generate, kind.forward, getattr(kind, "prepare_inputs_for_generation", kind.forward))
    passed_on = (name for call in calls for name in signature(call).parameters)
    return frozenset({*named, *_FOREIGN, *TransformersKwargs.__optional_keys__, *vars(GenerationConfig()), *passed_on})


def attached_reason(request: Request) -> str | None:
    """Return why a prompt must be answered alone, as what is attached says, or None."""
    return next(filter(None, (each.alone_reason(request) for each in (*request.supply.attachments,))), None)


def options_of_each(options: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the options of each of that many prompts."""
    each = [dict(options) for _ in range(count)]
    for name in OBJECT_OPTIONS:
        objects = list(options.get(name) or ())
        if not any(isinstance(given, list | tuple) for given in objects):
            own = [[copy.copy(given) for given in objects] for _ in range(count)]
        elif len(objects) == count and all(isinstance(given, list | tuple) for given in objects):
            own = [list(given) for given in objects]
        else:
            raise ConfigError(
                f"{name} is a list of {len(objects)} for {count} prompts; give objects for all of them, or one list for each "
                "prompt"
            )
        for mine, objects in zip(each, own, strict=True):
            mine.pop(name, None)
            mine |= {name: objects} if objects else {}
    return each


def _outcome(request: Request) -> GenerationResult | Exception:
    """Wait for the answer that another thread computes."""
    try:
        return request.answer.result()
    except BaseException:
        request.stop.set()
        raise
