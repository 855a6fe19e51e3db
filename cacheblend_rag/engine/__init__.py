"""The engine and what it returns."""

from cacheblend_rag.engine.background import AddJob, AddResult
from cacheblend_rag.engine.collection import ChunkCollection
from cacheblend_rag.engine.conversation import Conversation
from cacheblend_rag.engine.cost import WarmEstimate
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.generation import BlendStream, GenerationResult, PrefillResult, StopStrings
from cacheblend_rag.engine.interface import AnyCollection, AnyConversation, AnyEngine, AnyLibrary
from cacheblend_rag.engine.library import ChunkLibrary
from cacheblend_rag.engine.prefetch import Prefetch
from cacheblend_rag.engine.watch import WatchedPrefill

__all__ = [
    "AddJob",
    "AddResult",
    "AnyCollection",
    "AnyConversation",
    "AnyEngine",
    "AnyLibrary",
    "BlendEngine",
    "BlendStream",
    "ChunkCollection",
    "ChunkLibrary",
    "Conversation",
    "GenerationResult",
    "Prefetch",
    "PrefillResult",
    "StopStrings",
    "WarmEstimate",
    "WatchedPrefill",
]
