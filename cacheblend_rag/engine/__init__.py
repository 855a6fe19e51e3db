"""The engine and what it returns."""

from cacheblend_rag.engine.answering import ChunkCollection
from cacheblend_rag.engine.backend import Attachment
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.ingest import AddJob
from cacheblend_rag.engine.library import ChunkLibrary
from cacheblend_rag.engine.prefetch import Prefetch
from cacheblend_rag.engine.protocol import BlendStream, Engine, GenerationResult, Library, PrefillResult, StopStrings
from cacheblend_rag.report import AddResult, WarmEstimate

__all__ = [
    "AddJob",
    "AddResult",
    "Attachment",
    "BlendEngine",
    "BlendStream",
    "ChunkCollection",
    "ChunkLibrary",
    "Engine",
    "GenerationResult",
    "Library",
    "Prefetch",
    "PrefillResult",
    "StopStrings",
    "WarmEstimate",
]
