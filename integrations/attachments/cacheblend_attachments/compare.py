"""Every so many answers, one is compared with full prefill in the background."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheblend_attachments.answers import exact_match, f1_score
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine, GenerationResult
from cacheblend_rag.engine.backend import Attachment
from cacheblend_rag.engine.request import Request
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.model import before_layers

__all__ = ["CompareAnswers", "ComparedAnswers"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ComparedAnswers:
    """What comparing answers with full prefill has found so far.

    Attributes
    ----------
    same, different : int
        Answers that are full prefill's word for word once normalised (case, punctuation and articles aside), and those that are
        not.
    dropped : int
        Answers that were not compared because the one before still waited for the model, or comparing was ended.
    failed : int
        Answers whose full prefill failed, or whose chunks were changed meanwhile.
    f1 : float or None
        The share of words that an answer and full prefill's have in common, on average; None before the first comparison.
    """

    same: int
    different: int
    dropped: int
    failed: int
    f1: float | None


class CompareAnswers(Attachment, Collector):
    """Compares every Nth blended answer of an engine with full prefill of the same prompt, and logs a warning if they differ.

    No answer waits for it: a comparison begins when no prompt is computed or waits, and is left between two layers when one
    comes. One answer at a time waits for its comparison, and no text of prompts or answers is logged. Answers drawn at random,
    or under options that are objects, are not counted: a second draw would differ anyway.

    Parameters
    ----------
    every : int
        One answer in so many is compared, 1 or more.

    Raises
    ------
    ConfigError
        If `every` is no such number.
    """

    def __init__(self, every: int = 50) -> None:
        if type(every) is not int or every < 1:
            raise ConfigError(f"every={every!r:.40} of CompareAnswers must be a whole number, 1 or more")
        self._every = every
        self._lock = threading.Lock()
        self._answers = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._f1_sum = 0.0

    def attached(self, engine: BlendEngine) -> None:
        self._engine = engine
        engine.metrics.registry.register(self)

    def status(self) -> ComparedAnswers:
        """Return what was found so far."""
        with self._lock:
            counts = {name: self._counts[name] for name in ("same", "different", "dropped", "failed")}
            compared = counts["same"] + counts["different"]
            return ComparedAnswers(**counts, f1=self._f1_sum / compared if compared else None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the comparison under way, `timeout_s` seconds at most; return whether none is left."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def answered(self, request: Request, result: GenerationResult) -> None:
        if request.state.recomputed is None or self._is_drawn(request.options):
            return
        with self._lock:
            self._answers += 1
            if self._answers % self._every:
                return
            if self._closed or (self._thread is not None and self._thread.is_alive()):
                self._counts["dropped"] += 1
                return
            self._thread = threading.Thread(target=self._work, args=(request, result), name="cacheblend-compare")
            self._thread.start()

    def for_tenant(self) -> CompareAnswers:
        return CompareAnswers(self._every)

    def close(self) -> None:
        """Compare no more; returns at once."""
        self._closed = True
        if self.leave is not None:
            # A second time it is not there.
            with suppress(KeyError):
                self._engine.metrics.registry.unregister(self)
        super().close()

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        family = CounterMetricFamily(
            "cacheblend_compared_answers", "Answers compared with full prefill, by outcome.", labels=["outcome"]
        )
        status = self.status()
        for outcome in ("same", "different", "dropped", "failed"):
            family.add_metric([outcome], getattr(status, outcome))
        yield family
        yield CounterMetricFamily("cacheblend_compared_f1", "Sum of the F1 of compared answers.", self._f1_sum)

    @property
    def _is_over(self) -> bool:
        # The interpreter waits for this thread when it ends, and what it would find out then is of no use.
        return self._closed or not threading.main_thread().is_alive()

    def _aside(self, request: Request) -> GenerationResult | None:
        """Have a prompt prefilled in full when no other call needs the model; None where one came, or comparing was ended."""
        engine, thread = self._engine, threading.get_ident()
        scheduler, device = engine.backend.scheduler, engine.model.device
        assert engine.decoder is not None

        def check(*_: Any) -> None:
            if threading.get_ident() != thread:
                return
            if device.type == "cuda":
                # Otherwise all layers would be under way before the first is computed.
                torch.cuda.current_stream(device).synchronize()
            if scheduler.queue or self._is_over:
                raise _GaveWayError

        blend, most = BlendConfig(enabled=False), request.max_new_tokens
        asked = engine.begin_request(request.asked, blend, most, request.options, shares=False)
        with suppress(_GaveWayError), scheduler.after_others():
            check()
            with before_layers(engine.decoder.layers, check):
                [(_, result)] = engine.backend.answer([asked])
            if isinstance(result, GenerationResult):
                return result
            raise result
        return None

    def _is_drawn(self, options: dict[str, Any]) -> bool:
        """Whether an answer under these options would differ when it is asked for again."""
        own = self._engine.model.generation_config.do_sample
        return bool(options.get("do_sample", own)) or not all(_is_plain(each) for each in options.values())

    def _work(self, request: Request, result: GenerationResult) -> None:
        """Compare an answer when the model is free, and note what was found."""
        try:
            f1, outcome = self._compared(request, result)
        except Exception as error:
            f1, outcome = 0.0, "dropped" if self._closed else "failed"
            if not self._closed:
                # Its message may quote what was asked.
                _log.warning("an answer could not be compared with full prefill: %s", type(error).__name__)
        with self._lock:
            self._counts[outcome] += 1
            self._f1_sum += f1
        if outcome == "different":
            status = self.status()
            _log.warning(
                "an answer differs from full prefill's (F1 %.2f), as do %d of %d that were compared; a larger recompute_ratio "
                "brings them closer",
                f1,
                status.different,
                status.same + status.different,
            )

    def _compared(self, request: Request, result: GenerationResult) -> tuple[float, str]:
        """Return the F1 of an answer and full prefill's, and what becomes of it."""
        full: GenerationResult | None = None
        while full is None:
            if self._is_over:
                return 0.0, "dropped"
            full = self._aside(request)
        if full.prompt_ids != result.prompt_ids:
            raise PromptError("chunks of the prompt have changed since it was answered; it is not compared")
        return f1_score(result.text, full.text), "same" if exact_match(result.text, full.text) else "different"


class _GaveWayError(Exception):
    """Full prefill was left on the way."""


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
