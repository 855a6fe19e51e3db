"""Finding out what a vector store holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from pydantic import ValidationError

from cacheblend_rag.errors import ConfigError

__all__ = ["Inventory"]

_BATCH = 500


class Inventory:
    """Says which ids and documents a vector store has; the store itself is asked, since others may write to it too.

    Parameters
    ----------
    store : VectorStore
        The store.
    """

    def __init__(self, store: VectorStore) -> None:
        self._store = store

    def present(self, ids: Sequence[str]) -> list[str]:
        """Return those of the ids that the store has.

        Raises
        ------
        ConfigError
            If the store cannot say.
        """
        return [document.id for document in self._by_ids(ids) if document.id]

    def documents(self, ids: Sequence[str] | None = None) -> list[Document]:
        """Return the store's documents, with their ids.

        Parameters
        ----------
        ids : sequence of str, optional
            Only these; by default all, in stores that can list what they have: Chroma and those like it, InMemory and FAISS.

        Raises
        ------
        ConfigError
            If the store cannot list its documents.
        """
        if ids is not None:
            return list(self._by_ids(ids))
        store: Any = self._store
        if isinstance(store, InMemoryVectorStore):
            return list(self._by_ids(list(store.store)))
        places = getattr(store, "index_to_docstore_id", None)
        if isinstance(places, dict):
            return list(self._by_ids([places[place] for place in sorted(places)]))
        if hasattr(store, "get"):
            return list(self._by_ids(store.get(include=[])["ids"]))
        raise ConfigError(f"{type(store).__name__} cannot list its documents; give their ids by ids=")

    def _by_ids(self, ids: Sequence[str]) -> Iterator[Document]:
        for start in range(0, len(ids), _BATCH):
            batch = list(ids[start : start + _BATCH])
            try:
                yield from self._store.get_by_ids(batch)
            except ValidationError:
                # langchain-chroma cannot make a document of what was stored without metadata; its `get` gives the parts.
                yield from self._put_together(batch)
            except NotImplementedError as error:
                name = type(self._store).__name__
                raise ConfigError(
                    f"{name} cannot say which ids it has; delete by ids, and without other criteria"
                ) from error

    def _put_together(self, ids: list[str]) -> list[Document]:
        store: Any = self._store
        found = store.get(ids, include=["documents", "metadatas"])
        return [
            Document(text or "", id=id, metadata=metadata or {})
            for id, text, metadata in zip(found["ids"], found["documents"], found["metadatas"], strict=True)
        ]
