"""Fetching stored KV layer by layer, ahead of the computation."""

from cacheblend_rag.loader.layers import LayerLoader, loads_ahead

__all__ = ["LayerLoader", "loads_ahead"]
