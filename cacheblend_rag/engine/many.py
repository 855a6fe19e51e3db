"""Answering prompts: alone, or misses encoded together, prefills one after the other, answers decoded in padded batches."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from cacheblend_rag.engine.decode import RowEnds, RowProcessor, complete_options, end_ids, last_logits, make_result
from cacheblend_rag.engine.generation import GenerationResult, TokenWatch
from cacheblend_rag.engine.request import Request
from cacheblend_rag.engine.runner import ROOM_FOR_OUTPUT, Runner
from cacheblend_rag.errors import AnswerTimeoutError, CacheBlendError, ConfigError, UnsupportedModelError
from cacheblend_rag.fuse import BlendCache
from cacheblend_rag.fuse.selfcheck import check_batching
from cacheblend_rag.model import Decoder, PaddedBatch, model_window, takes_positions, text_decoder
from cacheblend_rag.tuning import Tuning

__all__ = ["Extent", "Many", "options_of_each", "plan_decoding"]

logger = logging.getLogger(__name__)

# Options that are objects, with a state of their own.
_OBJECTS = ("stopping_criteria", "logits_processor")
# Options of transformers' generate that mean the same for a row of a padded batch as for a prompt of its own.
_BY_ROW = frozenset(
    """
    bad_words_ids begin_suppress_tokens bos_token_id cache_implementation do_sample eos_token_id epsilon_cutoff eta_cutoff
    max_new_tokens min_new_tokens min_p num_beams num_return_sequences pad_token_id remove_invalid_values renormalize_logits
    repetition_penalty stop_strings suppress_tokens temperature tokenizer top_h top_k top_p typical_p use_cache
    """.split()
).union(_OBJECTS)  # of which every row gets its own
_DEFAULT_NEW_TOKENS = 256
# What a checkpoint's generation settings may say besides, to no effect here.
_WITHOUT_EFFECT = frozenset({"max_length", "transformers_version"})


@dataclass(frozen=True)
class Extent:
    """How far prompts that are decoded together reach."""

    # Tokens of the longest prompt, and the position after the last token of the one that reaches farthest.
    width: int
    end: int
    # Most tokens of an answer, up to which all are computed.
    limit: int
    rows: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and answers, padding included."""
        return self.rows * (self.width + self.limit)

    def joined(self, other: Extent) -> Extent:
        """Return what both come to together."""
        return Extent(
            max(self.width, other.width),
            max(self.end, other.end),
            max(self.limit, other.limit),
            self.rows + other.rows,
        )


def plan_decoding(extents: Sequence[Extent], has_room: Callable[[Extent], bool]) -> list[list[int]]:
    """Group prompts of similar length that are decoded together: indices into `extents`, the longest first."""
    groups: list[list[int]] = []
    extent: Extent | None = None
    for index in sorted(range(len(extents)), key=lambda index: extents[index].width, reverse=True):
        extent = extent and extent.joined(extents[index])
        if extent and has_room(extent):
            groups[-1].append(index)
        else:
            groups.append([index])
            extent = extents[index]
    return groups


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
            return self.alone(request)
        while not scheduler.take(request.patience, (self, request), lambda: request.is_given_up):
            try:
                answer = request.answer.result()
            except BaseException:
                request.stop.set()
                raise
            if answer is not None:
                return answer
            if request.has_shown:
                raise CacheBlendError("the thread that computed this answer was interrupted; try again")
            request.answer = Future()
        try:
            return self._lead(request)
        finally:
            scheduler.leave()

    def _lead(self, request: Request) -> GenerationResult:
        """Answer a prompt, and hand their answers to those that are answered with it."""
        others: list[Request] = []
        try:
            # One by one: who is out of the line is answered, whatever goes wrong with the next.
            if self._runner.scheduler.wanted:
                others.extend(self._company(request))
            answers = self.together([request, *others]) if others else [self.alone(request)]
        except BaseException:
            # Not their fault: they are answered without it.
            for other in others:
                other.answer.set_result(None)
            raise
        for other, answer in zip(others, answers[1:], strict=True):
            if isinstance(answer, Exception):
                other.answer.set_exception(answer)
            else:
                other.answer.set_result(answer)
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    def _company(self, request: Request) -> Iterator[Request]:
        """Yield those taken out of the line that may be decoded with a prompt, the oldest first, as far as there is room."""
        line = self._runner.scheduler.line()
        waiting = [each[1] for each in line if isinstance(each, tuple) and each[0] is self]
        if not waiting or self._solo_reason(request) is not None:
            return
        extent = self.extent(request)
        for other in waiting:
            try:
                if other.is_given_up or not _agree(request, other) or self._solo_reason(other) is not None:
                    continue
            except Exception:  # of its own options; it is told when its turn comes
                continue
            joined = extent.joined(self.extent(other))
            # It may have left the line meanwhile.
            if self.has_room(joined) and self._runner.scheduler.pick((self, other)):
                extent = joined
                yield other

    def _solo_reason(self, request: Request) -> str | None:
        """Return why a call is not decoded with other calls, or None."""
        # Objects that are not ours could hold up the others.
        brought = [each for name in _OBJECTS for each in request.options.get(name) or ()]
        if not all(getattr(each, "is_of_one_answer", False) for each in brought):
            return "it has processor or criteria objects of its own"
        return self.alone_reason(request)

    def answer_all(
        self, requests: Sequence[Request], batch_size: int | None, stop: threading.Event
    ) -> Iterator[tuple[int, GenerationResult | Exception]]:
        """Answer prompts whose options differ in objects only (`options_of_each`); yield the index of each, and its answer."""
        reasons = (self.alone_reason(request) for request in requests) if len(requests) > 1 and batch_size != 1 else ()
        reason = next((each for each in reasons if each is not None), None)

        def has_room(extent: Extent) -> bool:
            return self.has_room(extent) and (batch_size is None or extent.rows <= batch_size)

        for group in plan_decoding([self.extent(request) for request in requests], has_room):
            if stop.is_set():
                return
            if len(group) > 1 and reason is None:
                answers = self.together([requests[index] for index in group])
                # Of a group that was stopped before its first token there are no answers.
                if stop.is_set() and not any(isinstance(each, GenerationResult) and each.token_ids for each in answers):
                    return
                yield from zip(group, answers, strict=True)
                continue
            self._runner.encode_misses([requests[index] for index in group])
            for index in group:
                if not stop.is_set():
                    request = requests[index]
                    request.figures["alone_reason"] = reason
                    try:
                        yield index, self.alone(request)
                    except Exception as error:  # handed to who asked for this row
                        yield index, error
                    request.encoded.clear()

    def _limit(self, request: Request) -> int:
        """Return how many tokens an answer may have: what was asked, else the model's own setting or 256, within its window."""
        own = self._model.generation_config.max_new_tokens
        limit, layout = int(request.max_new_tokens or own or _DEFAULT_NEW_TOKENS), request.prompt.layout
        return limit if self._window is None else min(limit, self._window - max(len(layout), layout.end_position))

    def extent(self, request: Request) -> Extent:
        """Return how far a prompt reaches."""
        layout = request.prompt.layout
        return Extent(len(layout), layout.end_position, self._limit(request))

    def has_room(self, extent: Extent) -> bool:
        """Whether prompts of such an extent may be decoded together."""
        # A row that has ended goes on to the end of the longest answer; `PaddedBatch` keeps it within the window if it can.
        window = None if takes_positions(text_decoder(self._model)) else self._window
        return extent.tokens <= self._batch_tokens and (window is None or extent.end + extent.limit <= window)

    def together(self, requests: Sequence[Request]) -> Sequence[GenerationResult | Exception]:
        """Answer prompts in one batch, whose options differ in objects and limits only; one by one if that fails."""
        failure: Exception | None = None
        answers: Sequence[GenerationResult | Exception | None] = [None] * len(requests)
        try:
            answers = self._together(requests)
        except AnswerTimeoutError:
            raise
        except Exception as error:  # whose fault it is, they find out one by one
            failure = error.with_traceback(None)
        # The errors hold what the batch held, and must be gone before anything else is computed.
        lacking = [isinstance(failure or each, torch.OutOfMemoryError) for each in answers]
        answers = [None if lacks else each for each, lacks in zip(answers, lacking, strict=True)]
        begun = [each or self._begun_anew(request, failure) for request, each in zip(requests, answers, strict=True)]
        # What lacks memory alone as well is not too many prompts.
        if any(lacks and isinstance(each, GenerationResult) for each, lacks in zip(begun, lacking, strict=True)):
            self._take_less(requests)
        return begun

    def alone(self, request: Request) -> GenerationResult:
        """Answer a prompt by itself: the first forward of the model's ``generate`` is the blended prefill."""
        layout, limit, streamer = request.prompt.layout, self._limit(request), request.streamer
        options = complete_options(self._model, self._tokenizer, request.options)
        watch = TokenWatch(request.stop)
        criteria = StoppingCriteriaList([*options.pop("stopping_criteria", ()), watch])

        def forward(cache: BlendCache | None, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            if request.is_given_up:
                # Closed while it waited for the model: its prefill is not needed.
                return torch.empty(0, dtype=torch.int64)
            if streamer is not None:
                # A second attempt, after damaged KV, hands the streamer the prompt again, which is not to be shown.
                streamer.next_tokens_are_prompt = True
            output = self._model.generate(  # type: ignore[operator]  # transformers' stubs take it for a tensor
                **inputs,
                attention_mask=torch.ones_like(inputs["input_ids"]),
                **({} if cache is None else {"past_key_values": cache}),
                max_new_tokens=limit,
                stopping_criteria=criteria,
                streamer=streamer,
                **options,
            )
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            generated = sequences[0, len(layout) :].cpu()
            request.output_ids = tuple(generated.tolist())
            return generated

        self._runner.run(request, limit, forward)
        return make_result(self._model, self._tokenizer, request, request.output_ids, watch)

    def _take_less(self, requests: Sequence[Request]) -> None:
        """Have fewer prompts decoded together from now on, for these were too many."""
        tokens = reduce(Extent.joined, map(self.extent, requests)).tokens
        self._batch_tokens = min(self._batch_tokens, tokens // 2)
        logger.warning(
            "not enough memory to decode %d prompts together (%d tokens with their answers), so they are answered one by one, "
            "and from now on half as much is decoded together",
            len(requests),
            tokens,
        )

    def _begun_anew(self, request: Request, failure: Exception | None) -> GenerationResult | Exception:
        if request.has_shown:
            # What was read of it cannot be begun anew.
            return CacheBlendError(f"an answer that had begun was cut off: {failure or 'not enough memory'}; try again")
        try:
            return self.alone(request)
        except Exception as error:  # handed to who asked for it
            return error

    def _together(self, requests: Sequence[Request]) -> Sequence[GenerationResult | Exception]:
        model, tokenizer = self._model, self._tokenizer
        limits = [self._limit(request) for request in requests]
        layouts = [request.prompt.layout for request in requests]
        batch = PaddedBatch(
            [layout.token_ids for layout in layouts],
            [layout.positions for layout in layouts],
            min(max(limits), ROOM_FOR_OUTPUT),
        )
        shared = {name: value for name, value in requests[0].options.items() if name not in _OBJECTS}
        options = complete_options(model, tokenizer, shared)
        ends = RowEnds(batch, requests, limits, end_ids(model, options), options.pop("stopping_criteria", ()))
        self._prefill(requests, batch, ends)
        answers: list[list[int]] = [[] for _ in requests]
        if not all(map(ends.has_ended, range(len(requests)))):
            options["stopping_criteria"] = StoppingCriteriaList([ends])
            if any(request.options.get("logits_processor") for request in requests):
                options["logits_processor"] = LogitsProcessorList([RowProcessor(batch.starts, requests, ends)])
            with self._runner.scheduler.within(requests[0].patience), torch.no_grad(), batch.prefilled(model) as cache:
                output = model.generate(  # type: ignore[operator]  # transformers' stubs take it for a tensor
                    **batch.inputs(model.device), past_key_values=cache, max_new_tokens=max(limits), **options
                )
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            answers = sequences[:, batch.width :].tolist()
        return [
            ends.errors[row] if row in ends.errors else self._result(request, answers[row], row, ends, len(requests))
            for row, request in enumerate(requests)
        ]

    def _prefill(self, requests: Sequence[Request], batch: PaddedBatch, ends: RowEnds) -> None:
        """Prefill the prompts one after the other; one that fails or was given up is dropped."""
        self._runner.encode_misses([request for request in requests if not request.is_given_up])

        def prefill(row: int, cache: BlendCache | None, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            assert cache is not None
            if requests[row].is_given_up:
                ends.drop(row)
                return torch.empty(0)
            logits = last_logits(self._model, inputs, cache)[0]
            batch.take(row, cache, logits)
            return logits

        for row, request in enumerate(requests):
            try:
                self._runner.run(request, 0, partial(prefill, row))
                if request.streamer is not None:
                    # A streamer is shown the prompt first.
                    request.streamer.put(torch.tensor([request.prompt.layout.token_ids]))
            except Exception as error:  # handed to who asked for this row
                ends.drop(row, error)
            request.forward_ended = time.perf_counter()
            request.encoded.clear()

    def _result(self, request: Request, answer: list[int], row: int, ends: RowEnds, rows: int) -> GenerationResult:
        request.figures["batch_size"] = rows
        token_ids = tuple(answer[: ends.count(row)])
        return make_result(self._model, self._tokenizer, request, token_ids, ends)

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
    for name in _OBJECTS:
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
        {name: (type(value), value) for name, value in each.options.items() if name not in _OBJECTS}
        for each in (one, other)
    )
    return mine == theirs
