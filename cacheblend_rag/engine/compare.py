"""Comparing an answer with full prefill's, when nobody needs the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from cacheblend_rag.answers import exact_match, f1_score
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.decode import decode
from cacheblend_rag.engine.firsttoken import FirstLogits, TokenDistribution
from cacheblend_rag.engine.prompt import AssembledPrompt
from cacheblend_rag.engine.request import PromptRun, Request
from cacheblend_rag.engine.runner import Runner
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import Decoder, uncompiled

__all__ = ["Comparer", "Comparison", "GaveWayError", "Sample"]


@dataclass(frozen=True, eq=False)
class Sample:
    """An answered request that waits to be compared.

    Attributes
    ----------
    prompt : AssembledPrompt
        What was asked, in tokens.
    text : str or None
        The answer; None where only the first token can be compared.
    logits : torch.Tensor
        The first token's logits, ``(vocab,)``.
    max_new_tokens : int or None
        Most tokens of the answer.
    options : dict
        The options of ``generate`` that full prefill's answer is generated with.
    """

    prompt: AssembledPrompt
    text: str | None
    logits: torch.Tensor
    max_new_tokens: int | None
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far an answer is from full prefill's.

    Attributes
    ----------
    distance : float
        From 0, the same, to 1: the part of the words that is not shared (1 - F1). Where the answer was drawn at random, the total
        variation distance of the first token's distributions: the least probability with which two draws of it differ.
    first_token_kl : float
        Kullback-Leibler divergence of the first token's distribution from full prefill's, in nats.
    differs : bool
        Whether the answers can be compared and are not the same once normalised.
    remembers : bool
        Whether chunks of the prompt remembered their documents.
    """

    distance: float
    first_token_kl: float
    differs: bool
    remembers: bool = False


class GaveWayError(Exception):
    """A comparison was left on the way, because the model is wanted or the engine is closed."""


class Comparer:
    """Compares answers with full prefill's in the caller's thread.

    A comparison begins when no prompt is computed or waits, and is left between two layers when one comes.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    tokenizer : Any
        Its tokenizer.
    decoder : Decoder
        The model as blending sees it.
    runner : Runner
        Runs prompts.
    blend : BlendConfig
        The engine's own settings of blending.
    ending : callable
        Whether comparisons are not needed any more.
    whole_documents : callable
        Returns the tokens of a prompt with whole documents; see `Assembler.with_whole_documents`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        decoder: Decoder,
        runner: Runner,
        blend: BlendConfig,
        ending: Callable[[], bool],
        whole_documents: Callable[[AssembledPrompt], tuple[int, ...] | None],
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._runner = runner
        self._full = blend.replace(enabled=False)
        self._ending = ending
        self._whole_documents = whole_documents

    def sample(
        self,
        prompt: AssembledPrompt,
        text: str,
        logits: torch.Tensor,
        max_new_tokens: int | None,
        options: dict[str, Any],
    ) -> Sample:
        """Return what is to be compared of an answer that was generated with these options."""
        sampling = options.get("do_sample")
        sampling = self._model.generation_config.do_sample if sampling is None else sampling
        # What was drawn at random differs from another draw anyway, and an option that is an object may have a state.
        if sampling or not _is_plain(options):
            return Sample(prompt, None, logits, 1, {"do_sample": False})
        return Sample(prompt, text, logits, max_new_tokens, dict(options))

    def compare(self, sample: Sample) -> Comparison:
        """Compare an answer, waiting until nobody needs the model.

        Raises
        ------
        GaveWayError
            If it was left on the way; it may be tried again.
        """
        first = FirstLogits(self._model)
        remembers = sample.prompt.layout.remembers
        with self._runner.lock.after_others(), self._giving_way():
            result = decode(
                self._model,
                self._tokenizer,
                self._runner,
                PromptRun(Request(self._full, time.perf_counter()), self._reference(sample.prompt)),
                sample.max_new_tokens,
                sample.options,
                threading.Event(),
                None,
                first,
            )
        assert first.logits is not None
        full = TokenDistribution.of(first.logits)
        kl = full.kl_to(sample.logits)
        if sample.text is None:
            return Comparison(full.distance_to(sample.logits), kl, False, remembers)
        differs = not exact_match(sample.text, result.text)
        return Comparison(1 - f1_score(sample.text, result.text), kl, differs, remembers)

    def _reference(self, prompt: AssembledPrompt) -> AssembledPrompt:
        """Return the prompt whose full prefill knows what a prompt's chunks do, or the prompt itself where there is none."""
        ids = self._whole_documents(prompt) if prompt.layout.remembers else None
        if ids is None:
            return prompt
        return AssembledPrompt(PromptLayout(ids, tuple(range(len(ids))), ()))

    @contextmanager
    def _giving_way(self) -> Iterator[None]:
        device, thread = self._decoder.device, threading.get_ident()

        def check(*_: Any) -> None:
            if threading.get_ident() != thread:
                return
            if device.type == "cuda":
                # Otherwise all layers would be under way before the first is computed.
                torch.cuda.current_stream(device).synchronize()
            if self._runner.lock.wanted or self._ending():
                raise GaveWayError

        check()
        hooks = [layer.register_forward_pre_hook(check) for layer in self._decoder.layers]
        try:
            with uncompiled(self._model):
                yield
        finally:
            for hook in hooks:
                hook.remove()


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)
