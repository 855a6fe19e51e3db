"""The engine and what it returns."""

from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.generation import BlendStream, GenerationResult, PrefillResult
from cacheblend_rag.engine.ingest import AddResult, WarmEstimate

__all__ = ["AddResult", "BlendEngine", "BlendStream", "GenerationResult", "PrefillResult", "WarmEstimate"]
