"""Documents that a vector store has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cacheblend_rag.chunk import is_part
from cacheblend_rag.errors import ConfigError

__all__ = ["Inventory"]

_BATCH = 500


class Inventory:
    """Says which ids and documents a vector store has; the store itself is asked, since others may write to it too."""

    def __init__(self, store: VectorStore) -> None:
        self._store = store

    def present(self, ids: Sequence[str]) -> list[str]:
        """Return those of the ids that the store has; `ConfigError` if it cannot say."""
        return [document.id for document in self._by_ids([id for id in ids if not is_part(id)]) if document.id]

    def documents(self, ids: Sequence[str] | None = None) -> list[Document]:
        """Return the store's documents with these ids, or all of them.

        Stores that can list what they have are Chroma and those like it, InMemory and FAISS; `ConfigError` of others.
        """
        store: Any = self._store
        if ids is None and isinstance(store, InMemoryVectorStore):
            ids = list(store.store)
        elif ids is None and isinstance(places := getattr(store, "index_to_docstore_id", None), dict):
            ids = [places[place] for place in sorted(places)]
        elif ids is None and hasattr(store, "get"):
            ids = store.get(include=[])["ids"]
        if ids is None:
            raise ConfigError(f"{type(store).__name__} cannot list its documents; give their ids as ids=[...]")
        return list(self._by_ids(ids))

    def _by_ids(self, ids: Sequence[str]) -> Iterator[Document]:
        store: Any = self._store
        for start in range(0, len(ids), _BATCH):
            batch = list(ids[start : start + _BATCH])
            if hasattr(store, "_chroma_collection"):
                # Its own method cannot make a document of what was stored without metadata.
                found = store.get(batch, include=["documents", "metadatas"])
                for id, text, metadata in zip(found["ids"], found["documents"], found["metadatas"], strict=True):
                    yield Document(text or "", id=id, metadata=metadata or {})
                continue
            try:
                documents = store.get_by_ids(batch)
                if any(document.id is None for document in documents):
                    # langchain-qdrant's have none, so each is asked for alone.
                    documents = [each.model_copy(update={"id": id}) for id in batch for each in store.get_by_ids([id])]
            except NotImplementedError as error:
                raise ConfigError(
                    f"{type(store).__name__} cannot say which ids it has; delete by ids, and without other criteria"
                ) from error
            yield from documents
