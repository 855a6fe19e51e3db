"""Reuse the KV of retrieved chunks: precomputed once, blended at query time."""

from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine, BlendStream, GenerationResult, PrefillResult
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.report import BlendReport, ChunkReport

__all__ = [
    "BlendConfig",
    "BlendEngine",
    "BlendPrompt",
    "BlendReport",
    "BlendStream",
    "CacheBlendError",
    "Chunk",
    "ChunkReport",
    "ChunkRef",
    "GenerationResult",
    "PrefillResult",
]

__version__ = "0.1.0"
