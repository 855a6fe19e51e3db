"""Ways of the methods from chunks and a question to an answer."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from cacheblend_attachments.answers import right_losses
from cacheblend_lab.eval.inquiry import Inquiry
from cacheblend_lab.eval.journal import Answer
from cacheblend_lab.eval.methods import WHOLE_WAYS, EvalMethod
from cacheblend_lab.eval.prefix import PrefixAnswer, PrefixCache
from cacheblend_lab.settings import engine_settings, settings_of
from cacheblend_pml import Import, Module, Node, Prompt, Schema, Schemas, Text
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine, GenerationResult

__all__ = ["Way", "budget_for_charge", "make_way"]


def budget_for_charge(charge: float, tokens: int, measure: Callable[[int], float]) -> int | None:
    """Return how many of `tokens` chunk tokens can be recomputed for a charge, or None if not even one can.

    A selector's own work is part of what it charges, and each selector's is different, so the charge is measured. It grows
    with the number of tokens, nearly in proportion, so that a few measurements are enough: a search that goes on between the
    two nearest ones in proportion, or in the middle where that does not get on. The number whose charge is nearest is returned;
    None if the charge of a single token is more than one token's work above it.
    """
    token = 1 / tokens
    low, low_charge = 1, measure(1)
    if low_charge >= charge:
        return 1 if low_charge - charge <= token else None
    # A row counts at most 1 in each layer, so this one is no further than the charge aimed at unless the selector is cheaper.
    high = min(tokens, max(2, 1 + round((charge - low_charge) * tokens)))
    high_charge = measure(high) if high > 1 else low_charge
    while high_charge < charge and high < tokens:
        low, low_charge = high, high_charge
        high = min(tokens, max(high + 1, 2 * high))
        high_charge = measure(high)
    halve = False
    while high - low > 1 and min(charge - low_charge, high_charge - charge) > token / 2:
        share = 0.5 if halve else (charge - low_charge) / (high_charge - low_charge)
        middle = min(high - 1, max(low + 1, low + round(share * (high - low))))
        before = high - low
        middle_charge = measure(middle)
        if middle_charge < charge:
            low, low_charge = middle, middle_charge
        else:
            high, high_charge = middle, middle_charge
        halve = high - low > before / 2
    return low if abs(charge - low_charge) <= abs(high_charge - charge) else high


class Way(Protocol):
    """A way to answer: everything that a method does, on one engine."""

    def answer(
        self, inquiries: Sequence[Inquiry], before: Sequence[Mapping[str, Answer | None]]
    ) -> Sequence[Answer | None]:
        """Answer questions, several in one batch by a method that is a call of the engine; None where it is dearer than asked.

        `before` has what the methods before this one answered to each.
        """
        ...


def make_way(method: EvalMethod, engine: BlendEngine) -> Way:
    """Return what a method does on an engine that holds the settings which no call can change."""
    return _WAYS[method.way](method, engine)


class _Engine:
    """Full prefill and every blend: a call of the engine, greedy, so that an answer depends on the method alone."""

    def __init__(self, method: EvalMethod, engine: BlendEngine) -> None:
        self._method = method
        self._engine = engine
        # What has no meaning is found before the first question.
        whole = method.way in WHOLE_WAYS
        changes: dict[str, Any] = {"enabled": False} if whole else method.settings()
        self._blend = engine_settings(settings_of(engine), **changes)["blend"]
        if not whole:
            engine.check_blend(self._blend)

    def answer(
        self, inquiries: Sequence[Inquiry], before: Sequence[Mapping[str, Answer | None]]
    ) -> Sequence[Answer | None]:
        answers: list[Answer | None] = [None] * len(inquiries)
        # A batch has one ratio.
        by_ratio: dict[float, list[int]] = {}
        for number, (inquiry, others) in enumerate(zip(inquiries, before, strict=True)):
            ratio = self._ratio(inquiry, others)
            if ratio is not None:
                by_ratio.setdefault(ratio, []).append(number)
        alone = len(inquiries) == 1
        for ratio, numbers in by_ratio.items():
            blend = self._blend
            if ratio != blend.recompute_ratio:
                blend = blend.replace(recompute_ratio=ratio)
            prompts = [self._prompt(inquiries[number]) for number in numbers]
            limit = inquiries[numbers[0]].max_new_tokens
            results = (
                [self._engine.generate(prompts[0], limit, blend=blend, do_sample=False)]
                if alone
                else self._engine.generate_many(prompts, limit, blend=blend, do_sample=False)
            )
            for number, result in zip(numbers, results, strict=True):
                answers[number] = self._found(result, alone)
            for number, prompt in zip(numbers, prompts, strict=True):
                if inquiries[number].right and prompt.positions is None:
                    answers[number] = self._scored(answers[number], prompt, inquiries[number].right, blend)
        return answers

    def _scored(self, answer: Answer | None, prompt: BlendPrompt, right: str, blend: BlendConfig) -> Answer:
        """Return an answer with how likely the right one is found."""
        assert answer is not None
        ids = self._engine.tokenizer(right, add_special_tokens=False)["input_ids"]
        result, losses = right_losses(self._engine, prompt, ids, blend)
        first = int(result.logits[0].argmax())
        return replace(answer, loss=float(losses.mean()), first_loss=float(losses[0]), first_token=first)

    def _found(self, result: GenerationResult, alone: bool) -> Answer:
        report = result.report
        asked = None if self._method.way in WHOLE_WAYS else report.recompute_ratio
        return Answer(result.text, report.charged_ratio, asked, report.ttft_s if alone else None, report.output_tokens)

    def _ratio(self, inquiry: Inquiry, before: Mapping[str, Answer | None]) -> float | None:
        """Return the ratio to ask for; None where the method cannot be as cheap as it was asked to be."""
        if self._method.equal_to is not None:
            other = before[self._method.equal_to]
            return None if other is None or other.charged_ratio is None else min(1.0, other.charged_ratio)
        if self._method.charge is not None:
            return self._ratio_for(inquiry, self._method.charge)
        return self._blend.recompute_ratio

    def _prompt(self, inquiry: Inquiry) -> BlendPrompt:
        return inquiry.prompt

    def _ratio_for(self, inquiry: Inquiry, charge: float) -> float | None:
        """Return the ratio that a charge pays for, found anew for each question: what a selector costs may depend on it."""
        count = sum(_chunk_lengths(self._engine, inquiry))

        def measure(tokens: int) -> float:
            blend = self._blend.replace(recompute_ratio=tokens / count)
            return self._engine.prefill(inquiry.prompt, blend=blend).report.charged_ratio

        tokens = budget_for_charge(charge, count, measure)
        return None if tokens is None else tokens / count


class _NoContext(_Engine):
    """Full prefill of the prompt without its chunks."""

    def _prompt(self, inquiry: Inquiry) -> BlendPrompt:
        return inquiry.over(())


class _PromptCache(_Engine):
    """Prompt Cache (sections 3 and 5.1): documents are modules of a schema, and what is asked about them is computed.

    What stands before the documents is a module too, and the schema's as well what stands between two of them.
    """

    def _prompt(self, inquiry: Inquiry) -> BlendPrompt:
        task = inquiry.task
        nodes: list[Node] = []
        imports: list[Import] = []
        if task.head:
            nodes.append(Module("directive", (Text(task.head),)))
            imports.append(Import("directive"))
        for number, text in enumerate(inquiry.texts):
            if number and task.separator:
                nodes.append(Text(task.separator))
            nodes.append(Module(f"document-{number}", (Text(text),)))
            imports.append(Import(f"document-{number}"))
        return Schemas(self._engine).prompt(Prompt(Schema("documents", tuple(nodes)), (*imports, inquiry.tail)))


class _OneByOne(ABC):
    """A way that answers each question by itself."""

    def __init__(self, method: EvalMethod, engine: BlendEngine) -> None:
        del method
        self._engine = engine

    def answer(
        self, inquiries: Sequence[Inquiry], before: Sequence[Mapping[str, Answer | None]]
    ) -> Sequence[Answer | None]:
        return [self._answer(inquiry) for inquiry in inquiries]

    @abstractmethod
    def _answer(self, inquiry: Inquiry) -> Answer: ...


class _Prefix(_OneByOne):
    """Prefix caching: exact KV of everything up to the end of the first chunk, and the model's own forward over the rest.

    The cached KV is computed beforehand and not timed, as if each first chunk were cached after this head (CacheBlend, section
    7.1, makes the same idealisation); copying it is.
    """

    def _answer(self, inquiry: Inquiry) -> Answer:
        engine = self._engine
        first = engine.prompt_ids(BlendPrompt(inquiry.task.head, inquiry.ids[:1]))
        cache = PrefixCache(engine.model, first[: len(engine.prompt_ids(inquiry.prompt)) - 1])
        started = time.perf_counter()
        ids = engine.prompt_ids(inquiry.prompt)
        assembled_s = time.perf_counter() - started
        found = _after(engine, cache, ids, inquiry.max_new_tokens)
        lengths = _chunk_lengths(engine, inquiry)
        charged = 1 - lengths[0] / sum(lengths)
        return Answer(_text(engine, found), charged, None, assembled_s + found.ttft_s, len(found.token_ids))


class _Map(_OneByOne):
    """Answers from each chunk alone.

    Each chunk stands right after the head, so its KV comes from a prefix cache: computed beforehand and not timed, in favour
    of these methods.
    """

    def _map(self, inquiry: Inquiry) -> list[PrefixAnswer]:
        engine, head = self._engine, inquiry.task.head
        answers = []
        for chunk in inquiry.ids:
            ids = engine.prompt_ids(BlendPrompt(head, [chunk], inquiry.tail))
            cache = PrefixCache(engine.model, engine.prompt_ids(BlendPrompt(head, [chunk]))[: len(ids) - 1])
            answers.append(_after(engine, cache, ids, inquiry.max_new_tokens))
        return answers


class _MapReduce(_Map):
    """MapReduce (CacheBlend, section 7.1): the question answered from each chunk alone, then from these answers.

    The calls come one after the other, and the first token of the final answer waits for all of them.
    """

    def _answer(self, inquiry: Inquiry) -> Answer:
        parts = self._map(inquiry)
        texts = [text for text in (_text(self._engine, part).strip() for part in parts) if text]
        blend = self._engine.blend.replace(enabled=False)
        result = self._engine.generate(inquiry.over(texts), inquiry.max_new_tokens, blend=blend, do_sample=False)
        ttft_s = sum(part.seconds for part in parts) + result.report.ttft_s
        return Answer(result.text, None, None, ttft_s, result.report.output_tokens)


class _MapRerank(_Map):
    """MapRerank (CacheBlend, section 7.1): the question answered from each chunk alone, and the best of these answers.

    LangChain has the model write a score beside its answer, which small models cannot; the score here is the mean
    log-probability that the model gave to its answer. Which answer is the best is known when the last one ends, so that is when
    the first token is there.
    """

    def _answer(self, inquiry: Inquiry) -> Answer:
        parts = self._map(inquiry)
        best = max(parts, key=lambda part: part.mean_logprob if not math.isnan(part.mean_logprob) else -math.inf)
        ttft_s = sum(part.seconds for part in parts)
        return Answer(_text(self._engine, best), None, None, ttft_s, len(best.token_ids))


_WAYS: dict[str, Callable[[EvalMethod, BlendEngine], Way]] = {
    "full": _Engine,
    "no_context": _NoContext,
    "blend": _Engine,
    "prompt_cache": _PromptCache,
    "prefix": _Prefix,
    "map_reduce": _MapReduce,
    "map_rerank": _MapRerank,
}


def _chunk_lengths(engine: BlendEngine, inquiry: Inquiry) -> list[int]:
    return [0 if record is None else len(record.token_ids) for record in engine.records(inquiry.ids)]


def _after(engine: BlendEngine, cache: PrefixCache, ids: Sequence[int], max_new_tokens: int) -> PrefixAnswer:
    limit = max_new_tokens if engine.window is None else min(max_new_tokens, engine.window - len(ids))
    tokenizer = engine.tokenizer
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return cache.answer(ids, limit, pad)


def _text(engine: BlendEngine, answer: PrefixAnswer) -> str:
    return str(engine.tokenizer.decode(answer.token_ids, skip_special_tokens=True))
