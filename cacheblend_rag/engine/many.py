"""Answering many prompts: misses encoded together, prefills one after the other, answers decoded in padded batches."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from cacheblend_rag.engine.decode import RowEnds, RowProcessor, complete_options, end_ids, last_logits, make_result
from cacheblend_rag.engine.generation import GenerationResult, PieceStreamer, TokenWatch
from cacheblend_rag.engine.request import PromptRun
from cacheblend_rag.engine.runner import ROOM_FOR_OUTPUT, Runner
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.fuse import BlendCache
from cacheblend_rag.fuse.selfcheck import check_batching
from cacheblend_rag.model import Decoder, PaddedBatch, model_window, takes_positions, text_decoder
from cacheblend_rag.tuning import Tuning

__all__ = ["OBJECTS", "Call", "Extent", "Many", "options_of_each", "plan_decoding"]

logger = logging.getLogger(__name__)

OBJECTS = ("stopping_criteria", "logits_processor")
"""Options that are objects, with a state of their own."""
# Options of transformers' generate that mean the same for a row of a padded batch as for a prompt of its own.
_BY_ROW = frozenset(
    {
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "do_sample",
        "eos_token_id",
        "epsilon_cutoff",
        "eta_cutoff",
        "max_new_tokens",
        "min_new_tokens",
        "min_p",
        "num_beams",
        "num_return_sequences",
        "pad_token_id",
        "remove_invalid_values",
        "renormalize_logits",
        "repetition_penalty",
        "stop_strings",
        # Objects, of which every row gets its own.
        *OBJECTS,
        "suppress_tokens",
        "temperature",
        "tokenizer",
        "top_h",
        "top_k",
        "top_p",
        "typical_p",
        "use_cache",
    }
)
_DEFAULT_NEW_TOKENS = 256
# What a checkpoint's generation settings may say besides, to no effect here.
_WITHOUT_EFFECT = frozenset({"max_length", "transformers_version"})


@dataclass(eq=False)
class Call:
    """A prompt that somebody wants to have answered.

    Attributes
    ----------
    run : PromptRun
        The prompt.
    stop : threading.Event
        Ends the answer at the next token.
    streamer : PieceStreamer or None
        Shows the answer as it comes.
    """

    run: PromptRun
    stop: threading.Event
    streamer: PieceStreamer | None = None

    @property
    def is_given_up(self) -> bool:
        """Whether nobody needs its answer any more."""
        return self.stop.is_set() or (self.streamer is not None and not threading.main_thread().is_alive())


@dataclass(frozen=True)
class Extent:
    """How far prompts that are decoded together reach.

    Attributes
    ----------
    width : int
        Tokens of the longest prompt.
    end : int
        The position behind the last token of the prompt that reaches farthest.
    limit : int
        Maximum tokens of the longest answer, up to which all are computed.
    rows : int
        How many prompts.
    """

    width: int
    end: int
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
    """Group prompts of similar length that are decoded together.

    Parameters
    ----------
    extents : sequence of Extent
        Of each prompt.
    has_room : callable
        Whether prompts of such an extent may be decoded together; one that has none is a group of its own.

    Returns
    -------
    list of list of int
        Indices into `extents`, longest prompts first.
    """
    groups: list[list[int]] = []
    extent: Extent | None = None
    for index in sorted(range(len(extents)), key=lambda index: extents[index].width, reverse=True):
        joined = None if extent is None else extent.joined(extents[index])
        if joined is not None and has_room(joined):
            groups[-1].append(index)
            extent = joined
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

    def answer(
        self, runs: Sequence[PromptRun], batch_size: int | None, stop: threading.Event
    ) -> Iterator[tuple[int, GenerationResult]]:
        """Answer prompts whose options differ in objects only; see `options_of_each`.

        Parameters
        ----------
        runs : sequence of PromptRun
            The prompts.
        batch_size : int or None
            Maximum prompts that are decoded together.
        stop : threading.Event
            Ends the generation at the next token; prompts whose turn has not come are left out.

        Yields
        ------
        (int, GenerationResult)
            The index of a prompt in `runs`, and its answer.
        """
        reasons = (self.alone_reason(run) for run in runs) if len(runs) > 1 and batch_size != 1 else ()
        reason = next((each for each in reasons if each is not None), None)

        def has_room(extent: Extent) -> bool:
            return self.has_room(extent) and (batch_size is None or extent.rows <= batch_size)

        for group in plan_decoding([self.extent(run) for run in runs], has_room):
            if stop.is_set():
                return
            if len(group) > 1 and reason is None:
                answers = self.together([Call(runs[index], stop) for index in group])
                # Of a group that was stopped before its first token there are no answers.
                if stop.is_set() and not any(isinstance(each, GenerationResult) and each.token_ids for each in answers):
                    return
                for index, answer in zip(group, answers, strict=True):
                    if isinstance(answer, BaseException):
                        raise answer
                    yield index, answer
                continue
            self._runner.encode_misses([runs[index] for index in group])
            for index in group:
                if not stop.is_set():
                    run = runs[index]
                    run.figures["alone_reason"] = reason
                    result = self.alone(Call(run, stop))
                    run.kv.encoded.clear()
                    yield index, result

    def _limit(self, run: PromptRun) -> int:
        """Return how many tokens an answer may have: what was asked, else the model's own setting or 256, within its window."""
        own = self._model.generation_config.max_new_tokens
        limit, layout = int(run.request.max_new_tokens or own or _DEFAULT_NEW_TOKENS), run.prompt.layout
        return limit if self._window is None else min(limit, self._window - max(len(layout), layout.end_position))

    def extent(self, run: PromptRun) -> Extent:
        """Return how far a prompt reaches."""
        layout = run.prompt.layout
        return Extent(len(layout), layout.end_position, self._limit(run))

    def has_room(self, extent: Extent) -> bool:
        """Whether prompts of such an extent may be decoded together."""
        # A row that has ended goes on to the end of the longest answer; `PaddedBatch` keeps it within the window if it can.
        window = None if takes_positions(text_decoder(self._model)) else self._window
        return extent.tokens <= self._batch_tokens and (window is None or extent.end + extent.limit <= window)

    def together(self, calls: Sequence[Call]) -> Sequence[GenerationResult | Exception]:
        """Answer prompts in one batch, whose options differ in objects and limits only; one by one if there is no memory for it.

        Parameters
        ----------
        calls : sequence of Call
            The prompts, of none of which `alone_reason` says why not. A call that was given up gets an answer without tokens.

        Returns
        -------
        list of GenerationResult or Exception
            The answers, or what went wrong with one of them.
        """
        answers: list[GenerationResult | Exception | None]
        try:
            answers = [*self._together(calls)]
        except torch.OutOfMemoryError:
            answers = [None] * len(calls)
        # The errors hold what the batch held, and must be gone before anything else is computed.
        answers = [None if isinstance(each, torch.OutOfMemoryError) else each for each in answers]
        if None in answers:
            self._take_less([call.run for call in calls])
        return [
            self._begun_anew(call) if answer is None else answer for call, answer in zip(calls, answers, strict=True)
        ]

    def alone(self, call: Call) -> GenerationResult:
        """Answer a prompt by itself: the first forward of the model's ``generate`` is the blended prefill."""
        run, streamer = call.run, call.streamer
        layout, limit = run.prompt.layout, self._limit(run)
        options = complete_options(self._model, self._tokenizer, run.request.options)
        watch = TokenWatch(call.stop)
        criteria = StoppingCriteriaList([*options.pop("stopping_criteria", ()), watch])

        def forward(cache: BlendCache | None, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            if call.is_given_up:
                # Closed while it waited for the model: nobody needs its prefill.
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
            run.output_ids = tuple(generated.tolist())
            return generated

        self._runner.run(run, limit, forward)
        return make_result(self._model, self._tokenizer, run, run.output_ids, watch)

    def _take_less(self, runs: Sequence[PromptRun]) -> None:
        """Have fewer prompts decoded together from now on, for these were too many."""
        tokens = reduce(Extent.joined, map(self.extent, runs)).tokens
        self._batch_tokens = min(self._batch_tokens, tokens // 2)
        logger.warning(
            "there is no memory to decode %d prompts together that come to %d tokens with their answers, so they are answered "
            "one by one, and from now on half as much is decoded together",
            len(runs),
            tokens,
        )

    def _begun_anew(self, call: Call) -> GenerationResult | Exception:
        if call.streamer is not None and call.streamer.has_shown:
            # What was read of it cannot be begun anew.
            return torch.OutOfMemoryError("there was no memory to end an answer that had begun; ask again")
        try:
            return self.alone(call)
        except Exception as error:  # handed to who asked for it
            return error

    def _together(self, calls: Sequence[Call]) -> Sequence[GenerationResult | Exception]:
        model, tokenizer = self._model, self._tokenizer
        runs = [call.run for call in calls]
        limits = [self._limit(run) for run in runs]
        layouts = [run.prompt.layout for run in runs]
        batch = PaddedBatch(
            [layout.token_ids for layout in layouts],
            [layout.positions for layout in layouts],
            min(max(limits), ROOM_FOR_OUTPUT),
        )
        shared = {name: value for name, value in runs[0].request.options.items() if name not in OBJECTS}
        options = complete_options(model, tokenizer, shared)
        ends = RowEnds(
            batch,
            limits,
            end_ids(model, options),
            [run.request.options.get("stopping_criteria", ()) for run in runs],
            options.pop("stopping_criteria", ()),
            [call.stop for call in calls],
            [call.streamer for call in calls],
        )
        self._prefill(calls, batch, ends)
        answers: list[list[int]] = [[] for _ in calls]
        if not all(map(ends.has_ended, range(len(calls)))):
            options["stopping_criteria"] = StoppingCriteriaList([ends])
            processors = [run.request.options.get("logits_processor", ()) for run in runs]
            if any(processors):
                options["logits_processor"] = LogitsProcessorList([RowProcessor(batch.starts, processors, ends)])
            with (
                self._runner.lock.within(runs[0].request.patience),
                torch.no_grad(),
                batch.prefilled(model) as cache,
            ):
                output = model.generate(  # type: ignore[operator]  # transformers' stubs take it for a tensor
                    **batch.inputs(model.device), past_key_values=cache, max_new_tokens=max(limits), **options
                )
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            answers = sequences[:, batch.width :].tolist()
        return [
            ends.errors[row] if row in ends.errors else self._result(run, answers[row], row, ends, len(runs))
            for row, run in enumerate(runs)
        ]

    def _prefill(self, calls: Sequence[Call], batch: PaddedBatch, ends: RowEnds) -> None:
        """Prefill the prompts one after the other; one that fails or was given up is dropped."""
        self._runner.encode_misses([call.run for call in calls if not call.is_given_up])

        def prefill(row: int, cache: BlendCache | None, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            assert cache is not None
            if calls[row].is_given_up:
                ends.drop(row)
                return torch.empty(0)
            logits = last_logits(self._model, inputs, cache)[0]
            batch.take(row, cache, logits)
            return logits

        for row, call in enumerate(calls):
            try:
                self._runner.run(call.run, 0, partial(prefill, row))
                if call.streamer is not None:
                    # A streamer is shown the prompt first.
                    call.streamer.put(torch.tensor([call.run.prompt.layout.token_ids]))
            except Exception as error:  # handed to who asked for this row
                ends.drop(row, error)
            call.run.timings.forward_ended = time.perf_counter()
            call.run.kv.encoded.clear()

    def _result(self, run: PromptRun, answer: list[int], row: int, ends: RowEnds, rows: int) -> GenerationResult:
        run.figures["batch_size"] = rows
        token_ids = tuple(answer[: ends.count(row)])
        return make_result(self._model, self._tokenizer, run, token_ids, ends)

    def alone_reason(self, run: PromptRun) -> str | None:
        """Return why a prompt cannot be decoded together with others, or None."""
        if self._decoder is None:
            return "the model cannot be blended, and is not known to decode several prompts as it decodes one"
        if self._decoder.rope_reach is not None:
            return "the rotary frequencies of the model depend on the longest prompt that it reads"
        if self._decoder.column_biases and run.prompt.places is not None:
            return "the bias of the model counts the tokens of a batch, and a prompt places its own"
        request = run.request
        if request.turn is not None:
            return "a conversation keeps the KV of its answer"
        reason = self._runner.alone_reason(run)
        if reason is not None:
            return reason
        own = self._model.generation_config.to_diff_dict()
        given = {name: value for name, value in request.options.items() if value is not None}
        for name, value in (own | given).items():
            # What is 0, False or empty is switched off.
            if value and name not in _BY_ROW | _WITHOUT_EFFECT and not name.startswith("_"):
                return f"the generation option {name}={value!r} may read the padding of a batch"
        if self._self_check:
            with self._runner.lock.within(request.patience):
                try:
                    check_batching(self._decoder)
                except UnsupportedModelError as error:
                    self._refused = str(error)
                self._self_check = False
        return self._refused


def options_of_each(options: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the options of each of that many prompts.

    Stopping criteria and logits processors are objects for all prompts, of which each gets copies, since they may keep a state
    for the answer they are used in; or lists of them, one for each prompt.
    """
    each = [dict(options) for _ in range(count)]
    for name in OBJECTS:
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
