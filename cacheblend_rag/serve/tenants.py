"""An engine for each tenant, over one model and one store."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cacheblend_rag.engine import BlendEngine

__all__ = ["Tenants"]


class Tenants(Collector):
    """Makes engines for tenants as they come.

    As a collector it has the figures of all of them, each with its tenant's name.

    Parameters
    ----------
    engine : BlendEngine
        The first engine, which has the model and the store. Who made it closes it.
    """

    def __init__(self, engine: BlendEngine) -> None:
        self._first = engine
        self._engines = {engine.config.tenant: engine}
        self._lock = threading.Lock()

    def engine(self, tenant: str | None) -> BlendEngine:
        """Return the engine of a tenant; for None the first."""
        if tenant is None:
            return self._first
        with self._lock:
            engine = self._engines.get(tenant)
            if engine is None:
                engine = self._engines[tenant] = self._first.for_tenant(tenant)
            return engine

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of all tenants."""
        families: dict[str, Metric] = {}
        for tenant, engine in list(self._engines.items()):
            for family in engine.metrics.registry.collect():
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [
                    sample._replace(labels={**sample.labels, "tenant": tenant or ""}) for sample in family.samples
                ]
        yield from families.values()

    def close(self) -> None:
        """Close what was made here, once what was added in the background is encoded."""
        with self._lock:
            for engine in self._engines.values():
                if engine is not self._first:
                    engine.close()
