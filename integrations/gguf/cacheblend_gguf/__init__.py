"""GGUF models behind the engine protocol: llama.cpp computes, chunks come from stored KV."""

from cacheblend_gguf.engine import GGUFEngine

__all__ = ["GGUFEngine"]
