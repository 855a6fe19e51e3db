"""Answering many prompts: misses encoded together, prefills one after the other, answers decoded in padded batches."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from cacheblend_rag.engine.decode import complete_options, decode, output_limit
from cacheblend_rag.engine.features import decodes_alone
from cacheblend_rag.engine.firsttoken import FirstLogits
from cacheblend_rag.engine.generation import GenerationResult
from cacheblend_rag.engine.padded import PaddedBatch
from cacheblend_rag.engine.request import PromptRun, make_report
from cacheblend_rag.engine.rows import RowEnds, RowProcessor
from cacheblend_rag.engine.runner import ROOM_FOR_OUTPUT, Runner
from cacheblend_rag.engine.selfcheck import check_batching
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.fuse import BlendCache
from cacheblend_rag.model import Decoder, num_decoder_layers, past_adapters
from cacheblend_rag.tuning import Tuning

__all__ = ["Many", "options_of", "plan_decoding"]

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
# Objects, of which every row gets its own.
_OBJECTS = ("stopping_criteria", "logits_processor")
# What a checkpoint's generation settings may say besides, to no effect here.
_WITHOUT_EFFECT = frozenset({"max_length", "transformers_version"})


def plan_decoding(
    lengths: Sequence[int], limits: Sequence[int], batch_tokens: int, batch_size: int | None = None
) -> list[list[int]]:
    """Group prompts of similar length that are decoded together.

    Parameters
    ----------
    lengths : sequence of int
        Tokens of each prompt.
    limits : sequence of int
        Most tokens of each answer.
    batch_tokens : int
        Most tokens of a group, padding and answers included; a prompt that is longer is a group of its own.
    batch_size : int, optional
        Most prompts of a group.

    Returns
    -------
    list of list of int
        Indices into `lengths`, longest prompts first.
    """
    groups: list[list[int]] = []
    width = longest = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        longest = max(longest, limits[index])
        rows = len(groups[-1]) + 1 if groups else 1
        if groups and rows * (width + longest) <= batch_tokens and (batch_size is None or rows <= batch_size):
            groups[-1].append(index)
        else:
            groups.append([index])
            width, longest = lengths[index], limits[index]
    return groups


@dataclass(frozen=True)
class _Member:
    """A prompt of a batch: the most tokens of its answer, what notes its first logits, and what steers its own row."""

    run: PromptRun
    limit: int
    first: FirstLogits | None
    criteria: list[Any]
    processors: list[Any]


class Many:
    """Answers many prompts on one model.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    tokenizer : Any
        Its tokenizer.
    decoder : Decoder or None
        The model as blending sees it, or None if it cannot be blended.
    runner : Runner
        Runs prompts.
    tuning : Tuning
        How much is decoded together, and whether that is verified on the model when it is first asked for.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, decoder: Decoder | None, runner: Runner, tuning: Tuning
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._runner = runner
        self._tuning = tuning
        self._self_check = tuning.self_check
        self._refused: str | None = None

    def answer(
        self,
        runs: Sequence[PromptRun],
        max_new_tokens: int | None,
        batch_size: int | None,
        options: dict[str, Any],
        stop: threading.Event,
        firsts: Sequence[FirstLogits | None],
    ) -> Iterator[tuple[int, GenerationResult]]:
        """Answer prompts that come with the same options.

        Parameters
        ----------
        runs : sequence of PromptRun
            The prompts.
        max_new_tokens : int or None
            Most tokens of each answer.
        batch_size : int or None
            Most prompts that are decoded together.
        options : dict
            Further options of ``generate``, checked by `check_options`.
        stop : threading.Event
            Ends the generation at the next token; prompts whose turn has not come are left out.
        firsts : sequence of (FirstLogits or None)
            What notes the first token's logits of each prompt.

        Yields
        ------
        (int, GenerationResult)
            The index of a prompt in `runs`, and its answer.
        """
        objects = {name: _of_each(name, options.get(name), len(runs)) for name in _OBJECTS}
        options = {name: value for name, value in options.items() if name not in _OBJECTS}
        reason = self._alone_reason(runs, options) if len(runs) > 1 and batch_size != 1 else None
        limits = [output_limit(self._model, run, max_new_tokens) for run in runs]
        lengths = [len(run.prompt.layout) for run in runs]
        budget = self._tuning.decode_batch_tokens
        for group in plan_decoding(lengths, limits, budget, batch_size):
            if stop.is_set():
                return
            self._runner.encode_misses([runs[index] for index in group])
            if len(group) > 1 and reason is None:
                members = [
                    _Member(runs[index], limits[index], firsts[index], *(each[index] for each in objects.values()))
                    for index in group
                ]
                # Of a group that was stopped before its first token there are no answers.
                yield from zip(group, self._together(members, options, stop), strict=False)
                continue
            for index in group:
                if not stop.is_set():
                    runs[index].figures["alone_reason"] = reason
                    own = options_of(options | objects, index)
                    yield index, self._alone(runs[index], max_new_tokens, own, stop, firsts[index])

    def _alone(
        self,
        run: PromptRun,
        max_new_tokens: int | None,
        options: dict[str, Any],
        stop: threading.Event,
        first: FirstLogits | None,
    ) -> GenerationResult:
        result = decode(self._model, self._tokenizer, self._runner, run, max_new_tokens, options, stop, None, first)
        run.kv.encoded.clear()
        return result

    def _together(
        self,
        members: Sequence[_Member],
        options: dict[str, Any],
        stop: threading.Event,
    ) -> list[GenerationResult]:
        """Answer a group of prompts in one batch."""
        model, tokenizer = self._model, self._tokenizer
        layouts = [member.run.prompt.layout for member in members]
        limits = [member.limit for member in members]
        batch = PaddedBatch(
            [layout.token_ids for layout in layouts],
            [layout.positions for layout in layouts],
            min(max(limits), ROOM_FOR_OUTPUT),
        )
        for row, member in enumerate(members):
            if stop.is_set():
                return []
            self._prefill(member.run, batch, row, member.first)
        options = complete_options(model, tokenizer, options)
        strings = options.pop("stop_strings", None)
        ends = RowEnds(
            batch.width,
            batch.starts,
            limits,
            self._end_ids(options),
            [member.criteria for member in members],
            [StopStringCriteria(tokenizer, strings)] if strings else [],
            stop,
        )
        if any(member.processors for member in members):
            processor = RowProcessor(batch.starts, [member.processors for member in members])
            options["logits_processor"] = LogitsProcessorList([processor])
        options["stopping_criteria"] = StoppingCriteriaList([ends])
        with (
            self._runner.lock.within(members[0].run.request.wait_until),
            torch.no_grad(),
            batch.prefilled(model) as cache,
        ):
            output = model.generate(  # type: ignore[operator]  # transformers' stubs take it for a tensor
                **batch.inputs(model.device), past_key_values=cache, max_new_tokens=max(limits), **options
            )
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        answers = sequences[:, batch.width :].tolist()
        results = []
        for row, member in enumerate(members):
            run = member.run
            token_ids = tuple(answers[row][: ends.count(row)])
            run.figures["batch_size"] = len(members)
            report = make_report(run, num_decoder_layers(model), ends.times[0], len(token_ids), ends.tpot_s(row))
            text = tokenizer.decode(token_ids, skip_special_tokens=True)
            results.append(GenerationResult(text, token_ids, run.prompt.layout.token_ids, report))
        return results

    def _prefill(self, run: PromptRun, batch: PaddedBatch, row: int, first: FirstLogits | None) -> None:
        model = past_adapters(self._model)
        # As generate asks for them.
        keep = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}  # type: ignore[operator]

        def forward(cache: BlendCache | None, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            assert cache is not None
            with first or nullcontext():
                logits: torch.Tensor = model(**inputs, past_key_values=cache, use_cache=True, **keep).logits[0, -1]
            batch.take(row, cache, logits)
            return logits

        self._runner.run(run, 0, forward)
        run.timings.forward_ended = time.perf_counter()
        run.kv.encoded.clear()

    def _end_ids(self, options: dict[str, Any]) -> list[int]:
        ends = options.get("eos_token_id")
        ends = self._model.generation_config.eos_token_id if ends is None else ends
        return [] if ends is None else [int(each) for each in (ends if isinstance(ends, list | tuple) else [ends])]

    def _alone_reason(self, runs: Sequence[PromptRun], options: dict[str, Any]) -> str | None:
        """Return why these prompts cannot be decoded in one batch, or None."""
        if self._decoder is None:
            return "the model cannot be blended, and is not known to decode several prompts as it decodes one"
        if self._decoder.rope_reach is not None:
            return "the rotary frequencies of the model depend on the longest prompt that it reads"
        if self._decoder.column_biases and any(run.prompt.places is not None for run in runs):
            return "the bias of the model counts the tokens of a batch, and a prompt places its own"
        alone = decodes_alone(runs[0].request.blend)
        if alone is not None:
            return alone
        own = self._model.generation_config.to_diff_dict()
        given = {name: value for name, value in options.items() if value is not None}
        for name, value in (own | given).items():
            # What is 0, False or empty is switched off.
            if value and name not in _BY_ROW | _WITHOUT_EFFECT and not name.startswith("_"):
                return f"the generation option {name}={value!r} may read the padding of a batch"
        return self._refusal(runs[0].request.wait_until)

    def _refusal(self, wait_until: float | None) -> str | None:
        assert self._decoder is not None
        if self._self_check:
            with self._runner.lock.within(wait_until):
                if self._self_check:
                    try:
                        check_batching(self._decoder)
                    except UnsupportedModelError as error:
                        self._refused = str(error)
                    self._self_check = False
        return self._refused


def options_of(options: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the options of one prompt, where there are objects for each."""
    own = {}
    for name in _OBJECTS:
        objects = options.get(name) or ()
        own[name] = objects[index] if any(isinstance(each, list | tuple) for each in objects) else objects
    return {name: value for name, value in (options | own).items() if name not in _OBJECTS or value}


def _of_each(name: str, objects: Any, count: int) -> list[list[Any]]:
    """Return the stopping criteria, or the processors, of each prompt.

    Parameters
    ----------
    name : str
        The option, for messages.
    objects : Any
        Its value: objects for all prompts, of which each gets copies, since they may keep a state for the answer they are used
        in; or a list of them for each prompt.
    count : int
        Prompts.
    """
    objects = list(objects or ())
    if not any(isinstance(each, list | tuple) for each in objects):
        return [[copy.copy(each) for each in objects] for _ in range(count)]
    if len(objects) != count or not all(isinstance(each, list | tuple) for each in objects):
        raise ConfigError(
            f"{name} is a list of {len(objects)} for {count} prompts; give objects for all of them, or one list for each prompt"
        )
    return [list(each) for each in objects]
