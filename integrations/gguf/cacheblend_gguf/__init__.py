"""GGUF models behind the engine protocol: llama.cpp computes, chunks come from stored KV."""

from cacheblend_gguf.engine import GGUFEngine
from cacheblend_gguf.llama import LlamaOptions

__all__ = ["GGUFEngine", "LlamaOptions"]
