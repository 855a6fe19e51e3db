"""The online guard: some answers are compared with full prefill in the background, and the ratio is raised if they differ."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from cacheblend_rag.answers import exact_match, f1_score
from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.engine.assembler import Assembler
from cacheblend_rag.engine.decode import decode
from cacheblend_rag.engine.generation import GenerationResult
from cacheblend_rag.engine.prompt import AssembledPrompt
from cacheblend_rag.engine.request import PromptRun, Request
from cacheblend_rag.engine.runner import Runner
from cacheblend_rag.engine.watch import FirstLogits, TokenDistribution
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import Decoder, uncompiled
from cacheblend_rag.selection import make_selector
from cacheblend_rag.tuning import Tuning

__all__ = ["Guard", "GuardOrder", "GuardStatus"]

logger = logging.getLogger(__name__)

_LADDER = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75)
_MOST_PENDING = 8


@dataclass(frozen=True, slots=True)
class GuardStatus:
    """What the guard has found so far.

    Attributes
    ----------
    sampled : int
        Blended requests that were drawn for comparison and answered to their end.
    compared : int
        Requests compared with full prefill.
    differing : int
        How many of those whose answers could be compared differ after normalisation.
    pending : int
        Requests that wait to be compared.
    dropped : int
        Requests that were not compared, because too many were waiting, the ratio changed, or the engine was closed.
    failed : int
        Requests whose full prefill failed.
    window : int
        Comparisons that the two averages are taken over, `Tuning.guard_window` at most.
    divergence : float or None
        Average distance of the answers from full prefill's, 0 to 1; what `Tuning.guard_limit` is compared with.
    first_token_kl : float or None
        Average Kullback-Leibler divergence of the first token's distribution from full prefill's, in nats.
    recompute_ratio : float or "auto"
        The ratio in force; 1 where the guard has fallen back to full prefill.
    action : str or None
        What the guard has changed, and why.
    """

    sampled: int
    compared: int
    differing: int
    pending: int
    dropped: int
    failed: int
    window: int
    divergence: float | None
    first_token_kl: float | None
    recompute_ratio: float | Literal["auto"]
    action: str | None


@dataclass(frozen=True, slots=True)
class GuardOrder:
    """The settings in force for requests that bring none themselves.

    Attributes
    ----------
    blend : BlendConfig
        The settings.
    level : int
        How often they have changed; an answer given under earlier ones says nothing of these.
    action : str or None
        What the guard changed in them, and why.
    """

    blend: BlendConfig
    level: int = 0
    action: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """An answered request that waits to be compared, and what full prefill's answer is generated with.

    Its text is None where only the first token, by its logits ``(vocab,)``, can be compared.
    """

    prompt: AssembledPrompt
    text: str | None
    logits: torch.Tensor
    max_new_tokens: int | None
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Comparison:
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
    remembers: bool


class _GaveWayError(Exception):
    """A comparison was left on the way, because the model is wanted or the engine is closed."""


class Guard:
    """Compares some of an engine's answers with full prefill, and acts when they differ too much.

    Where chunks remember their documents, answers are compared with full prefill of the whole documents, as far as these fit the
    model's window, and nothing is done but report: full prefill of the chunks knows less.

    A comparison begins when no prompt is computed or waits, and is left between two layers when one comes. At most eight requests
    wait for it; more are dropped. No text of prompts or answers is logged, or kept when they are compared.

    Attributes
    ----------
    active : bool
        Whether any request is ever compared.
    order : GuardOrder
        The settings in force for requests that bring none themselves.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: Decoder | None,
        assembler: Assembler,
        runner: Runner,
        config: EngineConfig,
        blend: BlendConfig,
        tuning: Tuning,
    ) -> None:
        self._model = model
        self._decoder = decoder
        self._assembler = assembler
        self._runner = runner
        self._config, self._blend, self._tuning = config, blend, tuning
        self.active = decoder is not None and config.guard_rate > 0
        self.order = GuardOrder(blend)
        self._random = random.Random(0)
        self._changed = threading.Condition()
        # What follows is changed under the condition.
        self._queue: deque[_Sample] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._past_limit = False
        self._window: deque[_Comparison] = deque(maxlen=tuning.guard_window)
        self._counts: Counter[str] = Counter()

    def status(self) -> GuardStatus:
        """Return what was found so far."""
        with self._changed:
            names = ("sampled", "compared", "differing", "dropped", "failed")
            return GuardStatus(
                **{name: self._counts[name] for name in names},
                pending=len(self._queue),
                window=len(self._window),
                divergence=fmean(each.distance for each in self._window) if self._window else None,
                first_token_kl=fmean(each.first_token_kl for each in self._window) if self._window else None,
                recompute_ratio=self.order.blend.recompute_ratio if self.order.blend.enabled else 1.0,
                action=self.order.action,
            )

    def reset(self) -> None:
        """Go back to the engine's own settings, and begin a new window."""
        self._adopt(GuardOrder(self._blend, self.order.level + 1))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every sample is compared.

        Parameters
        ----------
        timeout_s : float, optional
            Seconds to wait at most; by default as long as it takes.

        Returns
        -------
        bool
            Whether none is left.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout_s)

    def close(self) -> None:
        """Drop what waits, and have the comparison under way left at its next layer; returns at once."""
        with self._changed:
            self._closed = True
            self._drop_queue()

    def watch(self, run: PromptRun) -> None:
        """Have the first token's logits of a request noted, if it is drawn for comparison."""
        if self.active and run.request.guard_level is not None and run.request.blend.enabled:
            with self._changed:
                drawn = self._random.random() < self._config.guard_rate
            run.first = FirstLogits(self._model) if drawn else None

    def offer(self, run: PromptRun, result: GenerationResult) -> None:
        """Have the answer to a request compared, if it was drawn; dropped where too many wait already."""
        if run.first is None or run.first.logits is None or run.recomputed is None:
            # It was not drawn, or not answered, or prefilled in full.
            return
        request, options = run.request, run.request.options
        sampling = options.get("do_sample")
        sampling = self._model.generation_config.do_sample if sampling is None else sampling
        # What was drawn at random differs from another draw anyway, and an option that is an object may have a state.
        if sampling or not _is_plain(options):
            sample = _Sample(run.prompt, None, run.first.logits, 1, {"do_sample": False})
        else:
            sample = _Sample(run.prompt, result.text, run.first.logits, request.max_new_tokens, dict(options))
        with self._changed:
            self._counts["sampled"] += 1
            if self._closed or len(self._queue) >= _MOST_PENDING or request.guard_level != self.order.level:
                self._counts["dropped"] += 1
                return
            self._queue.append(sample)
            # In the child of a fork the parent's thread is gone.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="cacheblend-guard")
                self._thread.start()

    @property
    def _ending(self) -> bool:
        # The interpreter waits for this thread when it ends; nobody waits for what it finds out then.
        return self._closed or not threading.main_thread().is_alive()

    def _work(self) -> None:
        """Compare what waits, one after the other."""
        while True:
            with self._changed:
                if not self._queue or self._ending:
                    self._thread = None
                    return
                sample = self._queue[0]
            found = None
            try:
                found = self._compare(sample)
            except _GaveWayError:
                continue
            except Exception as error:
                # Its message may quote what was asked.
                logger.warning("an answer could not be compared with full prefill: %s", type(error).__name__)
            with self._changed:
                # It may have been dropped meanwhile.
                if not self._queue or self._queue[0] is not sample:
                    continue
                self._queue.popleft()
                self._changed.notify_all()
                if found is None:
                    self._counts["failed"] += 1
                else:
                    self._counts.update(compared=1, differing=int(found.differs))
                    self._window.append(found)
                    self._judge()

    def _compare(self, sample: _Sample) -> _Comparison:
        """Compare an answer, waiting until nobody needs the model.

        Raises
        ------
        _GaveWayError
            If it was left on the way; it may be tried again.
        """
        assert self._decoder is not None
        prompt, remembers = sample.prompt, sample.prompt.layout.remembers
        # Full prefill of whole documents knows what chunks that remember do.
        ids = self._assembler.with_whole_documents(prompt) if remembers else None
        if ids is not None:
            prompt = AssembledPrompt(PromptLayout(ids, tuple(range(len(ids))), ()))
        first = FirstLogits(self._model)
        with self._runner.lock.after_others(), self._giving_way(self._decoder):
            full = self._blend.replace(enabled=False)
            request = Request(full, time.perf_counter(), max_new_tokens=sample.max_new_tokens, options=sample.options)
            run = PromptRun(request, prompt, first=first)
            text = decode(self._model, self._assembler.tokenizer, self._runner, run, threading.Event()).text
        assert first.logits is not None
        distribution = TokenDistribution.of(first.logits)
        kl = distribution.kl_to(sample.logits)
        if sample.text is None:
            return _Comparison(distribution.distance_to(sample.logits), kl, False, remembers)
        return _Comparison(1 - f1_score(sample.text, text), kl, not exact_match(sample.text, text), remembers)

    @contextmanager
    def _giving_way(self, decoder: Decoder) -> Iterator[None]:
        """Leave the forwards of this thread between two layers when the model is wanted, or the engine is closed."""
        device, thread = decoder.device, threading.get_ident()

        def check(*_: Any) -> None:
            if threading.get_ident() != thread:
                return
            if device.type == "cuda":
                # Otherwise all layers would be under way before the first is computed.
                torch.cuda.current_stream(device).synchronize()
            if self._runner.lock.wanted or self._ending:
                raise _GaveWayError

        check()
        hooks = [layer.register_forward_pre_hook(check) for layer in decoder.layers]
        try:
            with uncompiled(self._model):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _judge(self) -> None:
        """Act if a whole window is past the limit; call it under the condition."""
        if len(self._window) < self._tuning.guard_window:
            return
        divergence = fmean(each.distance for each in self._window)
        limit = self._tuning.guard_limit
        if divergence <= limit:
            self._past_limit = False
            return
        found = (
            f"the last {len(self._window)} answers compared differ from full prefill's by {divergence:.3f} on average"
        )
        # What chunks remember is not to be had by recomputing: there is nothing to raise.
        if self._config.guard_action == "report" or any(each.remembers for each in self._window):
            if not self._past_limit:
                logger.warning("guard: %s, past guard_limit=%g; nothing is changed", found, limit)
            self._past_limit = True
            return
        order = self._next(found)
        logger.warning("guard: %s, past guard_limit=%g", order.action, limit)
        self._adopt(order)

    def _next(self, found: str) -> GuardOrder:
        blend, level = self.order.blend, self.order.level + 1
        # "auto" never goes below quality_ratio.
        name = "quality_ratio" if blend.recompute_ratio == "auto" else "recompute_ratio"
        ratio = getattr(blend, name)
        higher = next((step for step in _LADDER if step > ratio), None)
        if self._config.guard_action == "full" or higher is None or make_selector(blend.selector).name == "none":
            return GuardOrder(blend.replace(enabled=False), level, f"full prefill: {found}")
        own = getattr(self._blend, name)
        return GuardOrder(blend.replace(**{name: higher}), level, f"{name} raised from {own:g} to {higher:g}: {found}")

    def _adopt(self, order: GuardOrder) -> None:
        with self._changed:
            self.order = order
            self._past_limit = False
            self._window.clear()
            # What was answered under other settings says nothing of these.
            self._drop_queue()

    def _drop_queue(self) -> None:
        self._counts["dropped"] += len(self._queue)
        self._queue.clear()
        self._changed.notify_all()


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)
