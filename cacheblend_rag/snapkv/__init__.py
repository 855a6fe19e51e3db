"""Eviction after prefill (SnapKV): the context KV that the question does not attend to is dropped before decoding."""

from cacheblend_rag.snapkv.eviction import Eviction

__all__ = ["Eviction"]
