"""Fetching stored KV layer by layer, ahead of the computation."""

from cacheblend_rag.loader.layers import LayerLoader, compute_alone, loads_ahead
from cacheblend_rag.loader.resumed import ResumedLayers

__all__ = ["LayerLoader", "ResumedLayers", "compute_alone", "loads_ahead"]
