"""Many machines with Ray: Ray Data warms a corpus, Ray Serve answers from it, one store behind both."""

from __future__ import annotations

from cacheblend_rag.ray.app import AppArgs, build_app
from cacheblend_rag.ray.warm import WarmSummary, warm

__all__ = ["AppArgs", "WarmSummary", "build_app", "warm"]
