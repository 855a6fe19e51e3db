"""An engine's figures for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cacheblend_rag.engine.guard import GuardStatus
from cacheblend_rag.errors import StoreError
from cacheblend_rag.report import BlendReport
from cacheblend_rag.store import StoreStats

__all__ = ["EngineMetrics"]

# From a tiny model on a CPU to a long prompt without any hit.
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class EngineMetrics:
    """Counts what an engine does; nothing leaves the process unless the registry is served.

    Parameters
    ----------
    stats : callable
        Returns the store's figures; called when the registry is read.
    guard : callable, optional
        Returns the online guard's figures; called when the registry is read.

    Attributes
    ----------
    registry : CollectorRegistry
        What ``prometheus_client.start_http_server(port, registry=...)`` serves.
    """

    def __init__(self, stats: Callable[[], StoreStats], guard: Callable[[], GuardStatus] | None = None) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"cacheblend_{name}", text, labels, registry=self.registry)

        self._prompts = counter("prompts", "Prompts answered.", "selector")
        self._fallbacks = counter("fallbacks", "Prompts computed as a whole although blending was asked for.")
        self._chunks = counter(
            "chunks", "Chunks of prompts: where their KV was read from, or that it was a miss.", "tier"
        )
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._context_tokens = counter("context_tokens", "Tokens of prompts' chunks.")
        self._recomputed_tokens = counter("recomputed_tokens", "Chunk tokens computed again.")
        self._output_tokens = counter("output_tokens", "Tokens generated.")
        self._load_bytes = counter("load_bytes", "Bytes of stored KV that prompts loaded, as the model takes it.")
        self._load_s = counter("load_wait_seconds", "Seconds that computation waited for stored KV.")
        self._encode_s = counter("encode_seconds", "Seconds that prompts spent on encoding misses.")
        self._ttft_s = Histogram(
            "cacheblend_ttft_seconds",
            "Seconds from the call to the first output token.",
            buckets=_TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.registry.register(_StoreCollector(stats))
        if guard is not None:
            self.registry.register(_GuardCollector(guard))

    def observe(self, report: BlendReport) -> None:
        """Count one answered prompt."""
        self._prompts.labels(report.selector).inc()
        if report.fallback_reason is not None:
            self._fallbacks.inc()
        for chunk in report.chunks:
            # Where the whole prompt was computed, nothing was read.
            self._chunks.labels("miss" if not chunk.hit else chunk.tier or "not read").inc()
        self._prompt_tokens.inc(report.prompt_tokens)
        self._context_tokens.inc(report.context_tokens)
        self._recomputed_tokens.inc(report.recomputed_tokens)
        self._output_tokens.inc(report.output_tokens)
        self._load_bytes.inc(report.load_bytes)
        self._load_s.inc(report.load_s)
        self._encode_s.inc(report.encode_s)
        self._ttft_s.observe(report.ttft_s)


class _StoreCollector(Collector):
    """Reads the store's figures when it is asked for them."""

    def __init__(self, stats: Callable[[], StoreStats]) -> None:
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that registering it does not read the store."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        try:
            stats = self._stats()
        except StoreError:
            # The engine was closed: what it counted is still there.
            return
        held = GaugeMetricFamily("cacheblend_store_bytes", "Bytes of KV held.", labels=["tier"])
        held.add_metric(["ram"], stats.ram_bytes)
        held.add_metric(["disk"], stats.disk_bytes)
        yield held
        yield GaugeMetricFamily("cacheblend_store_entries", "Chunks whose KV is held.", stats.entries)
        yield GaugeMetricFamily("cacheblend_store_names", "Named chunks.", stats.nodes)
        yield GaugeMetricFamily(
            "cacheblend_store_pinned_bytes", "Bytes that are never dropped for room.", stats.pinned_bytes
        )
        yield GaugeMetricFamily(
            "cacheblend_store_waiting_bytes", "Bytes of misses that wait to be written.", stats.waiting_bytes
        )
        yield CounterMetricFamily("cacheblend_store_evictions", "Entries dropped for room.", stats.evictions)
        yield CounterMetricFamily(
            "cacheblend_store_unwritten", "Misses that found no room to wait in.", stats.unwritten
        )


class _GuardCollector(Collector):
    """Reads the online guard's figures when it is asked for them."""

    def __init__(self, status: Callable[[], GuardStatus]) -> None:
        self._status = status

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: the names do not depend on the figures."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        status = self._status()
        samples = CounterMetricFamily(
            "cacheblend_guard_samples", "Answers drawn for comparison, by what came of it.", labels=["outcome"]
        )
        for outcome in ("compared", "dropped", "failed"):
            samples.add_metric([outcome], getattr(status, outcome))
        yield samples
        yield CounterMetricFamily(
            "cacheblend_guard_differing", "Compared answers that are not full prefill's.", status.differing
        )
        yield GaugeMetricFamily("cacheblend_guard_pending", "Answers that wait to be compared.", status.pending)
        if status.divergence is not None and status.first_token_kl is not None:
            yield GaugeMetricFamily(
                "cacheblend_guard_divergence", "Average distance from full prefill's answers.", status.divergence
            )
            yield GaugeMetricFamily(
                "cacheblend_guard_first_token_kl",
                "Average divergence of the first token's distribution, in nats.",
                status.first_token_kl,
            )
        if status.recompute_ratio != "auto":
            yield GaugeMetricFamily(
                "cacheblend_guard_recompute_ratio", "The ratio in force; 1 after a fallback.", status.recompute_ratio
            )
        yield GaugeMetricFamily(
            "cacheblend_guard_acted", "1 while the guard has changed the settings.", float(status.action is not None)
        )
