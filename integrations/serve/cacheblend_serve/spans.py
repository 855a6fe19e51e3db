"""Spans of OpenTelemetry, of what a request's time was spent on, where these are gathered; nothing is sent otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.trace import Trace

try:
    from opentelemetry import propagate, trace
except ImportError:
    propagate = trace = None  # type: ignore[assignment]

__all__ = ["RequestSpans"]

_WAITS = {"queue": "wait for the model", "open": "look-up", "encode": "encode misses"}


class _Part(NamedTuple):
    name: str
    start: float
    stop: float


class RequestSpans:
    """The spans of one request, below what its client says that it is a part of.

    Parameters
    ----------
    name : str
        What was asked for.
    headers : Mapping
        The request's headers, of which ``traceparent`` is read.
    """

    def __init__(self, name: str, headers: Mapping[str, str]) -> None:
        self._name = name
        self._parent: Any = None if propagate is None else propagate.extract(dict(headers))
        # The engine's moments are by another clock.
        self._epoch_s = time.time() - time.perf_counter()
        self._began = time.perf_counter()

    def record(self, answer: Answer) -> None:
        """Tell what an answer's time was spent on; none of its text."""
        if trace is None:
            return
        report = answer.report
        tracer = trace.get_tracer("cacheblend_rag")
        attributes: dict[str, str | int | float | bool] = {
            "gen_ai.usage.input_tokens": report.prompt_tokens,
            "gen_ai.usage.output_tokens": report.output_tokens,
            "cacheblend.cached_tokens": answer.cached_tokens,
            "cacheblend.hits": report.hits,
            "cacheblend.misses": report.misses,
            "cacheblend.recompute_ratio": report.recompute_ratio,
            "cacheblend.batch_size": report.batch_size,
        }
        whole = tracer.start_span(self._name, self._parent, attributes=attributes, start_time=self._ns(self._began))
        if report.trace is not None:
            below = trace.set_span_in_context(whole, self._parent)
            for part in _parts(report.trace):
                tracer.start_span(part.name, below, start_time=self._ns(part.start)).end(self._ns(part.stop))
        whole.end()

    def _ns(self, moment: float) -> int:
        return int((moment + self._epoch_s) * 1e9)


def _parts(seen: Trace) -> Iterator[_Part]:
    for wait in seen.waits:
        yield _Part(_WAITS.get(wait.what, wait.what), wait.start, wait.stop)
    layers = seen.layers
    if layers is not None and layers.load_began and layers.load_ended:
        yield _Part("load", min(layers.load_began.values()), max(layers.load_ended.values()))
    yield _Part("prefill", seen.forward_started, seen.forward_ended)
    if seen.token_times:
        yield _Part("decode", seen.forward_ended, seen.token_times[-1])
