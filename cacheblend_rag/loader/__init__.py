"""Fetching stored KV layer by layer, ahead of the computation."""

from cacheblend_rag.loader.layers import LayerLoader, loads_ahead
from cacheblend_rag.loader.resumed import ResumedLayers

__all__ = ["LayerLoader", "ResumedLayers", "loads_ahead"]
