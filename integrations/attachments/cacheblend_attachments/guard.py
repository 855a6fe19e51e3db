"""The online guard: some answers are compared with full prefill in the background, and the ratio is raised if they differ."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Literal

import torch
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from torch import nn
from transformers import PreTrainedModel

from cacheblend_attachments.answers import exact_match, f1_score
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine, GenerationResult
from cacheblend_rag.engine.attachment import Attachment, RunningForward
from cacheblend_rag.engine.request import Order, Request
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.model import watch_forward
from cacheblend_rag.selection import make_selector

__all__ = ["Guard", "GuardStatus", "distances", "first_logits"]

logger = logging.getLogger(__name__)

_LADDER = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75)
_MOST_PENDING = 8
_LARGEST = 256
# A token that the other distribution excludes would make the divergence infinite, and with it every mean.
_LEAST_PROBABILITY = 1e-12
_METRIC = "cacheblend_guard_"
_GAUGES = {
    "pending": "Answers waiting for comparison.",
    "divergence": "Average distance from full prefill's answers.",
    "first_token_kl": "Average divergence of the first token's distribution, in nats.",
    "recompute_ratio": "The ratio in force; 1 after a fallback.",
}


@dataclass(frozen=True, slots=True)
class GuardStatus:
    """Findings of the guard so far.

    Attributes
    ----------
    sampled, compared, differing : int
        Blended requests that were drawn for comparison and answered to their end; those that were compared with full prefill; how
        many of those whose answers could be compared differ after normalisation.
    pending, dropped, failed : int
        Requests that wait to be compared; that were not, because too many waited, the ratio changed, or the guard was closed;
        whose full prefill failed, or whose chunks were changed meanwhile.
    window : int
        Comparisons that the two averages are taken over, `window` of the guard at most.
    divergence : float or None
        Average distance of the answers from full prefill's, 0 to 1; what `limit` of the guard is compared with.
    first_token_kl : float or None
        Average Kullback-Leibler divergence of the first token's distribution from full prefill's, in nats.
    recompute_ratio : float
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
    recompute_ratio: float
    action: str | None


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """An answered request that waits to be compared, and what full prefill's answer is generated with.

    Its text is None where only the first token, by its logits ``(vocab,)``, can be compared.
    """

    prompt: BlendPrompt
    prompt_ids: tuple[int, ...]
    text: str | None
    logits: torch.Tensor
    asked: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Distance of an answer from full prefill's.

    The distance, from 0, the same, to 1, is the part of the words that is not shared (1 - F1). Of answers drawn at random it is
    the total variation distance of the first token's distributions: the least probability with which two draws differ. An answer
    `differs` if it can be compared and is not the same once normalised.
    """

    distance: float
    first_token_kl: float
    differs: bool


class Guard(Attachment, Collector):
    """Compares some of an engine's answers with full prefill, and acts when they differ too much.

    A comparison begins when no prompt is computed or waits, and is left between two layers when one comes. At most eight requests
    wait for it; more are dropped. No text of prompts or answers is logged, or kept when they are compared.

    Parameters
    ----------
    share : float
        Share of the answers that are compared in the background, 0 to 1.
    action : {"report", "raise", "full"}
        What is done where the compared answers differ too much: log a warning; raise the ratio step by step, up to full prefill;
        or prefill every prompt in full from then on.
    limit : float
        The average distance of the compared answers from full prefill's past which it acts, 0 (all the same) to 1.
    window : int
        How many compared answers that average is taken over; it acts when there are that many, and then starts again.

    Raises
    ------
    ConfigError
        If a value has no meaning.
    """

    def __init__(
        self,
        share: float = 0.05,
        *,
        action: Literal["report", "raise", "full"] = "report",
        limit: float = 0.1,
        window: int = 20,
    ) -> None:
        for name, value in (("share", share), ("limit", limit)):
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ConfigError(f"{name}={value!r} of a guard must be a number from 0 to 1")
        if action not in ("report", "raise", "full"):
            raise ConfigError(f'action={action!r:.40} of a guard must be "report", "raise" or "full"')
        if type(window) is not int or window < 1:
            raise ConfigError(f"window={window!r:.40} of a guard must be a whole number, 1 or more")
        self._another = partial(Guard, share, action=action, limit=limit, window=window)
        self._share, self._action, self._limit, self._size = share, action, limit, window
        self._order = Order(BlendConfig())
        self._random = random.Random(0)
        # The first token's logits by full prefill, of the comparison under way.
        self._full: list[torch.Tensor] = []
        self._changed = threading.Condition()
        # What follows is changed under the condition.
        self._queue: deque[_Sample] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._past_limit = False
        self._window: deque[_Comparison] = deque(maxlen=window)
        self._counts: Counter[str] = Counter()

    def attached(self, engine: BlendEngine) -> None:
        self._engine = engine
        self._order = Order(engine.blend)
        engine.metrics.registry.register(self)

    def order(self) -> Order:
        return self._order

    def status(self) -> GuardStatus:
        """Return what was found so far."""
        with self._changed:
            return GuardStatus(
                **{name: self._counts[name] for name in ("sampled", "compared", "differing", "dropped", "failed")},
                pending=len(self._queue),
                window=len(self._window),
                divergence=fmean(each.distance for each in self._window) if self._window else None,
                first_token_kl=fmean(each.first_token_kl for each in self._window) if self._window else None,
                recompute_ratio=self._order.blend.recompute_ratio if self._order.blend.enabled else 1.0,
                action=self._order.action,
            )

    def reset(self) -> None:
        """Go back to the engine's own settings, and begin a new window."""
        self._adopt(Order(self._engine.blend))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every sample is compared, `timeout_s` seconds at most; return whether none is left."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout_s)

    def around(self, forward: RunningForward) -> AbstractContextManager[object]:
        model, request = self._engine.model, forward.request
        if threading.current_thread() is self._thread:
            return first_logits(model, self._full)
        if request.order is self._order and request.blend.enabled and self not in request.notes:
            request.notes[self] = [] if self._random.random() < self._share else None
        noted = request.notes.get(self)
        return nullcontext() if noted is None else first_logits(model, noted)

    def answered(self, request: Request, result: GenerationResult) -> None:
        noted, options = request.notes.get(self), request.options
        if not noted or request.recomputed is None:
            # It was not drawn, or not answered, or prefilled in full.
            return
        sampling = options.get("do_sample")
        sampling = self._engine.model.generation_config.do_sample if sampling is None else sampling
        # What was drawn at random differs from another draw anyway, and an option that is an object may have a state.
        text = None if sampling or not _is_plain(options) else result.text
        first: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False}
        asked = first if text is None else {**options, "max_new_tokens": request.max_new_tokens}
        sample = _Sample(request.asked, result.prompt_ids, text, noted[0], asked)
        with self._changed:
            self._counts["sampled"] += 1
            if self._closed or len(self._queue) >= _MOST_PENDING or request.order is not self._order:
                self._counts["dropped"] += 1
                return
            self._queue.append(sample)
            # In the child of a fork the parent's thread is gone.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="cacheblend-guard")
                self._thread.start()

    def for_tenant(self) -> Guard:
        return self._another()

    def close(self) -> None:
        """Drop what waits; returns at once."""
        with self._changed:
            self._closed = True
            self._drop_queue()
        if self.leave is not None:
            # A second time it is not there.
            with suppress(KeyError):
                self._engine.metrics.registry.unregister(self)
        super().close()

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        status = self.status()
        samples = CounterMetricFamily(f"{_METRIC}samples", "Sampled answers, by outcome.", labels=["outcome"])
        for outcome in ("compared", "dropped", "failed"):
            samples.add_metric([outcome], getattr(status, outcome))
        yield samples
        yield CounterMetricFamily(
            f"{_METRIC}differing", "Compared answers that differ from full prefill's.", status.differing
        )
        for name, text in _GAUGES.items():
            value = getattr(status, name)
            # There may be no average yet.
            if value is not None:
                yield GaugeMetricFamily(_METRIC + name, text, value)
        acted = float(status.action is not None)
        yield GaugeMetricFamily(f"{_METRIC}acted", "1 while the guard has changed the settings.", acted)

    def _work(self) -> None:
        """Compare what waits, one after the other."""
        while True:
            with self._changed:
                # The interpreter waits for this thread when it ends, and what it would find out then is of no use.
                if not self._queue or not threading.main_thread().is_alive():
                    self._thread = None
                    return
                sample = self._queue[0]
            failure = None
            try:
                found = self._compare(sample)
                if found is None:
                    continue
            except Exception as error:
                found, failure = None, type(error).__name__
            with self._changed:
                # It may have been dropped meanwhile.
                if not self._queue or self._queue[0] is not sample:
                    continue
                self._queue.popleft()
                self._changed.notify_all()
                if found is None:
                    self._counts["failed"] += 1
                    # Its message may quote what was asked.
                    logger.warning("an answer could not be compared with full prefill: %s", failure)
                else:
                    self._counts.update(compared=1, differing=int(found.differs))
                    self._window.append(found)
                    self._judge()

    def _compare(self, sample: _Sample) -> _Comparison | None:
        """Compare an answer while the model is free; None where that was interrupted, and may be tried again.

        Raises
        ------
        CacheBlendError
            If the prompt can no longer be asked.
        """
        full = self._engine.generate_aside(sample.prompt, BlendConfig(enabled=False), **sample.asked)
        if full is None:
            return None
        if full.prompt_ids != sample.prompt_ids:
            raise PromptError("chunks of the prompt have changed since it was answered; it is not compared")
        kl, distance = distances(self._full[0], sample.logits)
        if sample.text is None:
            return _Comparison(distance, kl, False)
        differs = not exact_match(sample.text, full.text)
        return _Comparison(1 - f1_score(sample.text, full.text), kl, differs)

    def _judge(self) -> None:
        """Act if a whole window is past the limit; call it under the condition."""
        if len(self._window) < self._size:
            return
        divergence = fmean(each.distance for each in self._window)
        if divergence <= self._limit:
            self._past_limit = False
            return
        found = f"the last {self._size} compared answers differ from full prefill's by {divergence:.3f} on average"
        if self._action == "report":
            if not self._past_limit:
                logger.warning("guard: %s, past its limit of %g; nothing is changed", found, self._limit)
            self._past_limit = True
            return
        order = self._next(found)
        logger.warning("guard: %s, past its limit of %g", order.action, self._limit)
        self._adopt(order)

    def _next(self, found: str) -> Order:
        blend = self._order.blend
        higher = next((step for step in _LADDER if step > blend.recompute_ratio), None)
        if self._action == "full" or higher is None or make_selector(blend.selector).name == "none":
            return Order(blend.replace(enabled=False), f"full prefill: {found}")
        own = self._engine.blend.recompute_ratio
        text = f"recompute_ratio raised from {own:g} to {higher:g}: {found}"
        return Order(blend.replace(recompute_ratio=higher), text)

    def _adopt(self, order: Order) -> None:
        with self._changed:
            self._order = order
            self._past_limit = False
            self._window.clear()
            # What was answered under other settings says nothing of these.
            self._drop_queue()

    def _drop_queue(self) -> None:
        self._counts["dropped"] += len(self._queue)
        self._queue.clear()
        self._changed.notify_all()


@contextmanager
def first_logits(model: PreTrainedModel, noted: list[torch.Tensor]) -> Iterator[None]:
    """Note the logits, ``(vocab,)``, of the last row of a model's first forward inside a ``with`` block, in this thread only.

    They are the model's own, before anything that decoding does to them, and are copied only: the answer does not wait for more.
    """
    thread = threading.get_ident()
    noted.clear()

    def note(model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not noted and threading.get_ident() == thread:
            noted.append(output.logits[0, -1].detach().clone())

    with watch_forward(model, after=note):
        yield


def distances(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Return the Kullback-Leibler divergence, in nats, and total variation distance of two distributions by their logits.

    Beside the first one's 256 likeliest tokens all others are taken as one, by which distances can only be smaller.
    """
    p, q = (each.detach().to("cpu", torch.float64).softmax(-1) for each in (one, other))
    p, likeliest = p.topk(min(_LARGEST, p.numel()))
    p, q = (torch.cat([each, (1 - each.sum(0, keepdim=True)).clamp(min=0)]) for each in (p, q[likeliest]))
    ratio = p.clamp(min=_LEAST_PROBABILITY).log() - q.clamp(min=_LEAST_PROBABILITY).log()
    return max(0.0, float((p * ratio).sum())), min(1.0, float((p - q).abs().sum()) / 2)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)
