"""Documents for the command line: files cut into passages, kept in Chroma and in the engine's store side by side."""

from __future__ import annotations

from cacheblend_rag.documents.embedding import Embedding
from cacheblend_rag.documents.folder import LibrarySettings, clear_library, is_library, kv_folder
from cacheblend_rag.documents.library import Library, Match, WarmResult, passage_chunk, reading_order
from cacheblend_rag.documents.prompt import passage_config, question_prompt
from cacheblend_rag.documents.splitter import Passage, read_passages

__all__ = [
    "Embedding",
    "Library",
    "LibrarySettings",
    "Match",
    "Passage",
    "WarmResult",
    "clear_library",
    "is_library",
    "kv_folder",
    "passage_chunk",
    "passage_config",
    "question_prompt",
    "read_passages",
    "reading_order",
]
