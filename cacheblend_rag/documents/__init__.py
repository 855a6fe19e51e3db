"""Documents for the command line: files cut into passages, kept in Chroma and in the engine's store side by side."""

from __future__ import annotations

from cacheblend_rag.documents.embedding import Embedding
from cacheblend_rag.documents.library import (
    Library,
    LibrarySettings,
    clear_library,
    is_library,
    kv_folder,
    open_chroma,
    open_library,
    open_to_clear,
    passage_config,
)
from cacheblend_rag.documents.splitter import read_passages

__all__ = [
    "Embedding",
    "Library",
    "LibrarySettings",
    "clear_library",
    "is_library",
    "kv_folder",
    "open_chroma",
    "open_library",
    "open_to_clear",
    "passage_config",
    "read_passages",
]
