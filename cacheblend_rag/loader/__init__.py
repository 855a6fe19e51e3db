"""Fetching stored KV layer by layer, ahead of the computation."""

from cacheblend_rag.loader.layers import LayerLoader

__all__ = ["LayerLoader"]
