"""Blended prefill: a model's own forward over the selected rows, and stored KV for all others."""

from cacheblend_rag.fuse.steer import BlendCache, LayerSource, Steering

__all__ = ["BlendCache", "LayerSource", "Steering"]
