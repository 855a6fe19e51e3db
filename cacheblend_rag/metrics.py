"""An engine's figures for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheblend_rag.errors import StoreError
from cacheblend_rag.report import BLENDING_OFF, OTHER_TEXT, BlendReport
from cacheblend_rag.store import StoreStats

__all__ = ["EngineMetrics"]

# From a tiny model on a CPU to a long prompt without any hit.
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

# Counters that add up a figure of each report.
_SUMS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "context_tokens": ("context_tokens", "Tokens of prompts' chunks."),
    "recomputed_tokens": ("recomputed_tokens", "Chunk tokens recomputed."),
    "output_tokens": ("output_tokens", "Tokens generated."),
    "load_bytes": ("load_bytes", "Bytes of stored KV that prompts loaded, in the model's dtype."),
    "queue_s": ("queue_seconds", "Seconds that prompts waited for the model."),
    "overhead_s": ("overhead_seconds", "Seconds to first tokens other than waiting, encoding misses and prefill."),
    "load_s": ("load_wait_seconds", "Seconds that computation waited for stored KV."),
    "encode_s": ("encode_seconds", "Seconds that prompts spent on encoding misses."),
}


class EngineMetrics:
    """Counts what an engine does, in a `registry` to which attachments add theirs; nothing leaves the process unless that is
    served.
    """

    def __init__(self, stats: Callable[[], StoreStats], failures: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"cacheblend_{name}", text, labels, registry=self.registry)

        self._prompts = counter("prompts", "Prompts answered.", "selector")
        self._fallbacks = counter("fallbacks", "Prompts with chunks prefilled in full although blending was enabled.")
        self._chunks = counter("chunks", "Chunks of prompts, by the tier that their KV was read from, or miss.", "tier")
        self._other_texts = counter("other_texts", "Chunks that missed because another text was added under their ids.")
        self._sums = {field: counter(name, text) for field, (name, text) in _SUMS.items()}
        self._ttft_s = Histogram(
            "cacheblend_ttft_seconds",
            "Seconds from the call to the first output token.",
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.registry.register(_Figures(stats, failures))

    def observe(self, report: BlendReport) -> None:
        """Count one answered prompt."""
        self._prompts.labels(report.selector).inc()
        # What has no chunks, as a chat's first words, has nothing to blend.
        if report.fallback_reason not in (None, BLENDING_OFF) and report.chunks:
            self._fallbacks.inc()
        for chunk in report.chunks:
            if not chunk.tokens:
                self._chunks.labels("left out").inc()
                continue
            # Where the whole prompt was computed, nothing was read.
            self._chunks.labels("miss" if not chunk.hit else chunk.tier or "not read").inc()
            self._other_texts.inc(chunk.reason == OTHER_TEXT)
        for field, counter in self._sums.items():
            counter.inc(getattr(report, field))
        self._ttft_s.observe(report.ttft_s)


class _Figures(Collector):
    """Figures that are read when the registry is."""

    def __init__(self, stats: Callable[[], StoreStats], failures: Callable[[], int]) -> None:
        self._stats, self._failures = stats, failures

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "cacheblend_store_failures",
            "Requests of answers to the store while it could not be used.",
            self._failures(),
        )
        try:
            now = self._stats()
        except StoreError:
            # The engine was closed: what it counted is still there.
            return
        held = GaugeMetricFamily("cacheblend_store_bytes", "Bytes of KV held.", labels=["tier"])
        held.add_metric(["ram"], now.ram_bytes)
        held.add_metric(["disk"], now.disk_bytes)
        yield held
        yield GaugeMetricFamily("cacheblend_store_entries", "Chunks whose KV is held.", now.entries)
        yield GaugeMetricFamily("cacheblend_store_names", "Chunk ids.", now.nodes)
        yield CounterMetricFamily("cacheblend_store_evictions", "Entries evicted.", now.evictions)
        yield CounterMetricFamily("cacheblend_store_copies_dropped", "Copies evicted from RAM.", now.ram_evictions)
