"""The online guard: some answers are compared with full prefill in the background, and the ratio is raised if they differ."""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from transformers import PreTrainedModel

from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.engine.compare import Comparer, Comparison, GaveWayError, Sample
from cacheblend_rag.engine.firsttoken import FirstLogits
from cacheblend_rag.engine.generation import GenerationResult
from cacheblend_rag.engine.prompt import AssembledPrompt
from cacheblend_rag.engine.request import PromptRun
from cacheblend_rag.engine.runner import Runner
from cacheblend_rag.model import Decoder
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
        Of those whose answers could be compared, the ones whose answers are not the same after normalisation.
    pending : int
        Requests that wait to be compared.
    dropped : int
        Requests that were not compared: too many waited already, or the ratio changed, or the engine was closed meanwhile.
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
    """The settings in force for requests that bring none of their own.

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


class Guard:
    """Compares some of an engine's answers with full prefill, and acts when they differ too much.

    Where chunks remember their documents, answers are compared with full prefill of the whole documents, as far as these fit the
    model's window, and nothing is done but report: full prefill of the chunks knows less.

    At most eight requests wait for it; more are dropped. No text of prompts or answers is logged, or kept when they are
    compared.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    tokenizer : Any
        Its tokenizer.
    decoder : Decoder or None
        The model as blending sees it; None if it cannot be blended, and there is nothing to guard.
    runner : Runner
        Runs prompts.
    config : EngineConfig
        What share of the answers is compared, and what is done.
    blend : BlendConfig
        The engine's own settings of blending.
    tuning : Tuning
        Past which distance the guard acts, and over how many answers that is averaged.
    whole_documents : callable
        Returns the tokens of a prompt with the whole documents of its chunks, which those that remember are compared with; None
        where these do not fit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        decoder: Decoder | None,
        runner: Runner,
        config: EngineConfig,
        blend: BlendConfig,
        tuning: Tuning,
        whole_documents: Callable[[AssembledPrompt], tuple[int, ...] | None],
    ) -> None:
        self._model = model
        self._config, self._blend, self._tuning = config, blend, tuning
        self._comparer = None
        if decoder is not None and config.guard_rate:
            self._comparer = Comparer(model, tokenizer, decoder, runner, blend, lambda: self._ending, whole_documents)
        self._random = random.Random(0)
        self._changed = threading.Condition()
        self._queue: deque[Sample] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._order = GuardOrder(blend)
        self._past_limit = False
        self._window: deque[Comparison] = deque(maxlen=tuning.guard_window)
        self._sampled = self._compared = self._differing = self._dropped = self._failed = 0

    @property
    def active(self) -> bool:
        """Whether any request is ever compared."""
        return self._comparer is not None

    @property
    def order(self) -> GuardOrder:
        """The settings in force for requests that bring none of their own."""
        return self._order

    def status(self) -> GuardStatus:
        """Return what was found so far."""
        with self._changed:
            ratio = self._order.blend.recompute_ratio if self._order.blend.enabled else 1.0
            return GuardStatus(
                sampled=self._sampled,
                compared=self._compared,
                differing=self._differing,
                pending=len(self._queue),
                dropped=self._dropped,
                failed=self._failed,
                window=len(self._window),
                divergence=fmean(each.distance for each in self._window) if self._window else None,
                first_token_kl=fmean(each.first_token_kl for each in self._window) if self._window else None,
                recompute_ratio=ratio,
                action=self._order.action,
            )

    def reset(self) -> None:
        """Go back to the engine's own settings, and begin a new window."""
        self._adopt(GuardOrder(self._blend, self._order.level + 1))

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
            self._dropped += len(self._queue)
            self._queue.clear()
            self._changed.notify_all()

    def watch(self, run: PromptRun) -> FirstLogits | None:
        """Return what notes the first token's logits of a request that is drawn for comparison; None for any other."""
        if self._comparer is None or run.request.guard_level is None or not run.request.blend.enabled:
            return None
        with self._changed:
            drawn = self._random.random() < self._config.guard_rate
        return FirstLogits(self._model) if drawn else None

    def offer(
        self,
        run: PromptRun,
        result: GenerationResult,
        first: FirstLogits,
        max_new_tokens: int | None,
        options: dict[str, Any],
    ) -> None:
        """Have the answer to a request that was drawn compared; dropped where too many wait already.

        Parameters
        ----------
        run : PromptRun
            The request.
        result : GenerationResult
            Its answer.
        first : FirstLogits
            What noted its first logits.
        max_new_tokens : int or None
            Most tokens of the answer, as was asked.
        options : dict
            The options of ``generate`` it was answered with.
        """
        if run.recomputed is None or first.logits is None:
            # It was computed as a whole.
            return
        with self._changed:
            self._sampled += 1
            if self._closed or len(self._queue) >= _MOST_PENDING or run.request.guard_level != self._order.level:
                self._dropped += 1
                return
            assert self._comparer is not None
            self._queue.append(self._comparer.sample(run.prompt, result.text, first.logits, max_new_tokens, options))
            # In the child of a fork the parent's thread is gone.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="cacheblend-guard")
                self._thread.start()

    def _work(self) -> None:
        assert self._comparer is not None
        while True:
            with self._changed:
                if not self._queue or self._ending:
                    self._thread = None
                    return
                sample = self._queue[0]
            try:
                found = self._comparer.compare(sample)
            except GaveWayError:
                continue
            except Exception as error:
                # Its message may quote what was asked.
                logger.warning("an answer could not be compared with full prefill: %s", type(error).__name__)
                self._leave(sample, failed=True)
                continue
            with self._changed:
                if self._leave(sample):
                    self._compared += 1
                    self._differing += found.differs
                    self._window.append(found)
                    self._judge()

    @property
    def _ending(self) -> bool:
        # The interpreter waits for this thread when it ends; nobody waits for what it finds out then.
        return self._closed or not threading.main_thread().is_alive()

    def _leave(self, sample: Sample, failed: bool = False) -> bool:
        """Take a sample off the queue, unless it was dropped meanwhile."""
        with self._changed:
            if not self._queue or self._queue[0] is not sample:
                return False
            self._queue.popleft()
            self._failed += failed
            self._changed.notify_all()
            return True

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
        blend, level = self._order.blend, self._order.level + 1
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
            self._order = order
            self._past_limit = False
            self._window.clear()
            # What was answered under other settings says nothing of these.
            self._dropped += len(self._queue)
            self._queue.clear()
            self._changed.notify_all()
