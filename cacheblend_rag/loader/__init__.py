"""Fetching stored KV layer by layer, ahead of the computation."""

from cacheblend_rag.loader.layers import LayerLoader, compute_alone

__all__ = ["LayerLoader", "compute_alone"]
