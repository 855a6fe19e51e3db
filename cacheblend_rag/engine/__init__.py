"""The engine and what it returns."""

from cacheblend_rag.engine.engine import AddResult, BlendEngine, WarmEstimate
from cacheblend_rag.engine.generation import BlendStream, GenerationResult, PrefillResult

__all__ = ["AddResult", "BlendEngine", "BlendStream", "GenerationResult", "PrefillResult", "WarmEstimate"]
