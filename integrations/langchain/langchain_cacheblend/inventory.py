"""Documents that a vector store has, and the other stores over its engine."""

from __future__ import annotations

import logging
import threading
import uuid
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from pydantic import ValidationError

from cacheblend_rag.chunk import is_part
from cacheblend_rag.engine import Engine
from cacheblend_rag.errors import ConfigError

__all__ = ["Inventory", "Siblings"]

logger = logging.getLogger(__name__)

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
        raise ConfigError(f"{type(store).__name__} cannot list its documents; give their ids as ids=[...]")

    def _by_ids(self, ids: Sequence[str]) -> Iterator[Document]:
        for start in range(0, len(ids), _BATCH):
            batch = list(ids[start : start + _BATCH])
            try:
                found = self._store.get_by_ids(batch)
                if all(document.id is not None for document in found):
                    yield from found
                    continue
                # langchain-qdrant's have none, so that only of one that is asked for alone it is known which one it is.
                for id in batch:
                    yield from (each.model_copy(update={"id": id}) for each in self._store.get_by_ids([id]))
            except ValidationError:
                # langchain-chroma cannot make a document of what was stored without metadata; its `get` gives the parts.
                yield from self._put_together(batch)
            except NotImplementedError as error:
                raise ConfigError(
                    f"{type(self._store).__name__} cannot say which ids it has; delete by ids, and without other criteria"
                ) from error

    def _put_together(self, ids: list[str]) -> list[Document]:
        store: Any = self._store
        found = store.get(ids, include=["documents", "metadatas"])
        return [
            Document(text or "", id=id, metadata=metadata or {})
            for id, text, metadata in zip(found["ids"], found["documents"], found["metadatas"], strict=True)
        ]


class Siblings:
    """The other vector stores of this process over an engine; two objects around one inner store are no others to each other.

    `name` tells a store's documents from those of other stores, in other processes too; by default it is its collection, in
    stores that say which one that is, else a name of this process's own.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[Engine, weakref.WeakSet[Siblings]]] = weakref.WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, inner: VectorStore, engine: Engine, name: str | None = None) -> None:
        self._inner = inner
        with self._lock:
            self._family = self._of.setdefault(engine, weakref.WeakSet())
            self.name = name or self._given_name()
            self._family.add(self)

    def texts(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the texts that other stores have under these ids."""
        found: dict[str, str] = {}
        with self._lock:
            others = [each._inner for each in self._family if each._inner is not self._inner] if ids else []
        for inner in others:
            try:
                documents = Inventory(inner).documents(ids)
            except Exception as error:  # whatever a store raises that is closed, or cannot be asked
                logger.debug("%s was not asked for its documents: %s", type(inner).__name__, error)
                continue
            found |= {document.id: document.page_content for document in documents if document.id}
        return found

    def warn_of(self, ids: Sequence[str], texts: Sequence[str]) -> None:
        """Warn if other stores have other texts under these ids."""
        held = self.texts(list(dict.fromkeys(ids)))
        taken = [id for id, text in zip(ids, texts, strict=True) if held.get(id, text) != text]
        if taken:
            logger.warning(
                "%d of %d ids, %s for one, stand for another text in another vector store over this engine: an engine keeps the "
                "KV of one text per id, here of the one that was added last. Use ids that no two stores share, or give each "
                "store an engine with its own tenant",
                len(taken),
                len(ids),
                taken[0],
            )

    def _given_name(self) -> str:
        for each in self._family:
            if each._inner is self._inner:
                return each.name
        kind = type(self._inner).__name__
        # Chroma's collections have ids of their own.
        collection = getattr(getattr(self._inner, "_chroma_collection", None), "id", None)
        if collection is not None:
            return f"{kind} {collection}"
        collection = getattr(self._inner, "collection_name", None)
        name = f"{kind} {collection}"
        is_taken = not isinstance(collection, str) or any(each.name == name for each in self._family)
        return f"{kind} {uuid.uuid4().hex}" if is_taken else name
