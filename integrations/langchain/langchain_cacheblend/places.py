"""Chunks of a vector store's texts: the document that each is a piece of, and where in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.vectorstores import VectorStore

from cacheblend_rag import Chunk
from cacheblend_rag.chunk import document_name
from cacheblend_rag.engine import Engine
from cacheblend_rag.errors import ConfigError

__all__ = ["SOURCE", "Places"]

SOURCE = "source"
"""Metadata by which loaders say what a text was taken from; without it a text is of no document."""

# Metadata by which loaders and retrievers tell apart the texts that they take from one source.
_PARTS = ("page", "row", "seq_num", "doc_id")


class Places:
    """Makes chunks of a store's texts.

    A document is what has the same source, the same part of it, and the same values of `boundary`, in one store. Its pieces are
    read in the order of ``start_index``, as splitters write it with ``add_start_index=True``; a piece without it has no place.
    """

    def __init__(self, inner: VectorStore, engine: Engine, name: str | None, boundary: Sequence[str]) -> None:
        if isinstance(boundary, str) or not all(isinstance(key, str) for key in boundary):
            raise ConfigError(f'boundary={boundary!r} must be a list of metadata keys, as in boundary=["team"]')
        companions = engine.config.companions
        if companions == "similar" and boundary:
            raise ConfigError(
                'boundary says which texts may know of each other, but with companions="similar" the engine reads every chunk '
                'behind any other; give it companions="own"'
            )
        collection = getattr(inner, "_chroma_collection", None)
        collection_name = getattr(collection, "id", None) or getattr(inner, "collection_name", None) or ""
        self._store = name or f"{type(inner).__name__} {collection_name}"
        self._boundary = tuple(boundary)
        # The metadata that may tell readers apart; None where no text is read behind another.
        self.divides = None if companions == "neutral" else frozenset((SOURCE, *_PARTS, *boundary))
        if companions == "similar":
            self.divides = frozenset()

    def chunk(self, id: str, text: str, metadata: Mapping[str, Any]) -> Chunk:
        """Return the chunk of a text."""
        source, document, start = document_name(metadata.get(SOURCE)), None, metadata.get("start_index")
        if source is not None:
            values = {key: metadata[key] for key in _PARTS if document_name(metadata.get(key)) is not None}
            values |= {key: metadata.get(key) for key in self._boundary}
            document = json.dumps([self._store, {SOURCE: source} | values], default=str)
        # Splitters that do not find a piece again say -1.
        has_place = document is not None and type(start) is int and start >= 0
        return Chunk(text, id, document=document, start=start if has_place else None)

    def of_source(self, metadata: Mapping[str, Any]) -> str | None:
        """Return what the names of all documents of a text's source begin with; None for a text of none."""
        source = document_name(metadata.get(SOURCE))
        return None if source is None else json.dumps([self._store, {SOURCE: source}])[:-2]
