"""Answering prompts: misses are encoded together, prompts prefilled one after the other, answers decoded in padded batches."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from cacheblend_rag.engine.decode import OBJECT_OPTIONS, Answers, Prefilled, decode, end_ids
from cacheblend_rag.engine.generation import GenerationResult
from cacheblend_rag.engine.request import Request
from cacheblend_rag.engine.runner import ROOM_FOR_OUTPUT, Runner
from cacheblend_rag.errors import AnswerTimeoutError, CacheBlendError, ConfigError, UnsupportedModelError
from cacheblend_rag.fuse.selfcheck import check_batching
from cacheblend_rag.model import Decoder, PaddedBatch, model_window, num_decoder_layers
from cacheblend_rag.tuning import Tuning

__all__ = ["Many", "options_of_each"]

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


class Many:
    """Answers many prompts on one model, those of like length together, as far as that is exact."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, decoder: Decoder | None, runner: Runner, tuning: Tuning
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._runner = runner
        self._window = model_window(model)
        self._batch_tokens = tuning.decode_batch_tokens
        self._self_check = tuning.self_check
        self._refused: str | None = None

    def answer(self, request: Request) -> GenerationResult:
        """Answer a prompt together with those that wait and may be decoded with it, in this thread or that of one of them."""
        scheduler = self._runner.scheduler
        if scheduler.is_mine:
            # A criterion of an answer under way asks something itself.
            return _answer(self.together([request])[0])
        if not scheduler.take(request.patience, (self, request), lambda: request.is_given_up):
            try:
                return _answer(request.answer.result())
            except BaseException:
                request.stop.set()
                raise
        try:
            return self._lead(request)
        finally:
            scheduler.leave()

    def _lead(self, request: Request) -> GenerationResult:
        """Answer a prompt, and hand their answers to those that are answered with it."""
        group = [request]
        try:
            if self._runner.scheduler.wanted:
                group.extend(self._company(request))
            answers = self.together(group)
        except BaseException as error:
            for other in group[1:]:
                why = f"the call that this one was answered with was ended by {type(error).__name__}; try again"
                other.answer.set_result(CacheBlendError(why))
            raise
        for other, answer in zip(group[1:], answers[1:], strict=True):
            other.answer.set_result(answer)
        return _answer(answers[0])

    def _company(self, request: Request) -> Iterator[Request]:
        """Yield those taken out of the line that may be decoded with a prompt, the oldest first, as far as there is room."""
        line = self._runner.scheduler.line()
        waiting = [each[1] for each in line if isinstance(each, tuple) and each[0] is self]
        if not waiting or self._solo_reason(request) is not None:
            return
        group = [request]
        for other in waiting:
            try:
                if other.is_given_up or not _agree(request, other) or self._solo_reason(other) is not None:
                    continue
            except Exception:  # of its own options; it is told when its turn comes
                continue
            # It may have left the line meanwhile.
            if self._has_room([*group, other]) and self._runner.scheduler.pick((self, other)):
                group.append(other)
                yield other

    def _solo_reason(self, request: Request) -> str | None:
        """Return why a call is not decoded with other calls, or None."""
        # Objects that are not ours could hold up the others.
        brought = [each for name in OBJECT_OPTIONS for each in request.options.get(name) or ()]
        if not all(getattr(each, "is_of_one_answer", False) for each in brought):
            return "it has processor or criteria objects of its own"
        return self.alone_reason(request)

    def answer_all(
        self, requests: Sequence[Request], batch_size: int | None, stop: threading.Event
    ) -> Iterator[tuple[Request, GenerationResult | Exception]]:
        """Answer prompts whose options differ in objects only (`options_of_each`); yield each with its answer."""
        reasons = (self.alone_reason(request) for request in requests) if len(requests) > 1 and batch_size != 1 else ()
        reason = next((each for each in reasons if each is not None), None)
        for group in self._groups(requests, batch_size):
            if reason is not None:
                self._runner.encode_misses(group)
            for part in [group] if reason is None else [[request] for request in group]:
                if stop.is_set():
                    return
                for request in part:
                    request.state.figures["alone_reason"] = reason
                for request, answer in zip(part, self.together(part), strict=True):
                    # When all are stopped, what has not begun is left out.
                    if not stop.is_set() or (isinstance(answer, GenerationResult) and answer.token_ids):
                        yield request, answer

    def _groups(self, requests: Sequence[Request], batch_size: int | None) -> list[list[Request]]:
        """Return prompts of similar length that are decoded together, the longest first."""
        groups: list[list[Request]] = []
        for request in sorted(requests, key=lambda each: len(each.prompt.layout), reverse=True):
            if groups and len(groups[-1]) != batch_size and self._has_room([*groups[-1], request]):
                groups[-1].append(request)
            else:
                groups.append([request])
        return groups

    def _limit(self, request: Request) -> int:
        """Return how many tokens an answer may have: what was asked, else the model's own setting or 256, within its window."""
        own = self._model.generation_config.max_new_tokens
        limit, layout = int(request.max_new_tokens or own or _DEFAULT_NEW_TOKENS), request.prompt.layout
        return limit if self._window is None else min(limit, self._window - max(len(layout), layout.end_position))

    def _tokens(self, requests: Sequence[Request]) -> int:
        """Return the tokens of prompts that are decoded together and of their answers, padding included."""
        width = max(len(request.prompt.layout) for request in requests)
        return len(requests) * (width + max(map(self._limit, requests)))

    def _has_room(self, requests: Sequence[Request]) -> bool:
        """Whether prompts may be decoded together: a row that has ended goes on to the end of the longest answer."""
        end = max(request.prompt.layout.end_position for request in requests) + max(map(self._limit, requests))
        return (self._window is None or end <= self._window) and self._tokens(requests) <= self._batch_tokens

    def together(self, requests: Sequence[Request]) -> Sequence[GenerationResult | Exception]:
        """Answer prompts in one batch, whose options differ in objects and limits only; one by one if that fails."""
        try:
            return self._batch(requests)
        except Exception as error:  # of a single prompt its own; whose fault it is otherwise, they find out one by one
            if len(requests) == 1:
                return [error]
            if isinstance(error, AnswerTimeoutError):
                raise
            # Its frames hold what the batch held, which is to be gone before anything else is computed.
            failure = error.with_traceback(None)
        answers: list[GenerationResult | Exception] = []
        for request in requests:
            if request.has_shown:
                # What was read of it cannot be begun anew.
                answers.append(CacheBlendError(f"an answer that had begun was cut off: {failure}; try again"))
            else:
                answers.extend(self.together([request]))
        lacks_memory = isinstance(failure, torch.OutOfMemoryError)
        # What lacks memory alone as well is not too many prompts.
        if lacks_memory and not any(isinstance(each, torch.OutOfMemoryError) for each in answers):
            tokens = self._tokens(requests)
            self._batch_tokens = min(self._batch_tokens, tokens // 2)
            logger.warning(
                "not enough memory to decode %d prompts together (%d tokens with their answers), so they are answered one by "
                "one, and from now on half as much is decoded together",
                len(requests),
                tokens,
            )
        return answers

    def _batch(self, requests: Sequence[Request]) -> Sequence[GenerationResult | Exception]:
        """Answer prompts: a single one goes on in its own cache, several in one padded batch."""
        ends = end_ids(self._model, requests[0].options)
        answers = Answers(self._tokenizer, requests, [self._limit(request) for request in requests], ends)
        if len(requests) == 1:
            with self._runner.prefill(requests[0], answers.limits[0]) as prefilled:
                decode(self._model, self._tokenizer, prefilled, answers)
        else:
            prompts = self._prefill(requests, answers)
            if prompts is not None:
                with self._runner.scheduler.within(requests[0].patience):
                    decode(self._model, self._tokenizer, prompts, answers)
        for request in requests:
            request.state.figures["batch_size"] = len(requests)
        return [answers.result(row, num_decoder_layers(self._model)) for row in range(len(requests))]

    def _prefill(self, requests: Sequence[Request], answers: Answers) -> Prefilled | None:
        """Prefill prompts one after the other into a padded batch; one that fails or was given up is dropped."""
        layouts = [request.prompt.layout for request in requests]
        batch = PaddedBatch(
            [layout.token_ids for layout in layouts],
            [layout.positions for layout in layouts],
            min(max(answers.limits), ROOM_FOR_OUTPUT),
        )
        self._runner.encode_misses([request for request in requests if not request.is_given_up])
        for row, request in enumerate(requests):
            try:
                with self._runner.prefill(request, 0) as prefilled:
                    assert prefilled.logits is not None
                    batch.take(row, prefilled.cache, prefilled.logits[-1])
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # handed to who asked for this row
                answers.drop(row, error)
            request.state.forward_ended = time.perf_counter()
        if len(answers.errors) == len(requests):
            return None
        return Prefilled(*batch.filled(self._model.device))

    def alone_reason(self, request: Request) -> str | None:
        """Return why a prompt cannot be decoded together with others, or None."""
        if self._decoder is None:
            return "the model cannot be blended, and may not decode several prompts as it decodes one"
        if self._decoder.rope_reach is not None:
            return "the rotary frequencies of the model depend on the longest prompt that it reads"
        if (reason := self._runner.alone_reason(request)) is not None:
            return reason
        own = self._model.generation_config.to_diff_dict()
        given = {name: value for name, value in request.options.items() if value is not None}
        for name, value in (own | given).items():
            # What is 0, False or empty is switched off.
            if value and name not in _BY_ROW | _WITHOUT_EFFECT and not name.startswith("_"):
                return f"the generation option {name}={value!r} may read the padding of a batch"
        if self._self_check:
            with self._runner.scheduler.within(request.patience):
                try:
                    check_batching(self._decoder)
                except UnsupportedModelError as error:
                    self._refused = str(error)
                self._self_check = False
        return self._refused


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


def _agree(one: Request, other: Request) -> bool:
    """Return whether two calls ask for the same way of decoding."""
    mine, theirs = (
        {name: (type(value), value) for name, value in each.options.items() if name not in OBJECT_OPTIONS}
        for each in (one, other)
    )
    return mine == theirs


def _answer(outcome: GenerationResult | Exception) -> GenerationResult:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
