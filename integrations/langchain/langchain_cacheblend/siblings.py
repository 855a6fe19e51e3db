"""Vector stores over one engine, whose documents share its names."""

from __future__ import annotations

import logging
import threading
import uuid
import weakref
from collections.abc import Sequence
from typing import ClassVar

from langchain_core.vectorstores import VectorStore

from cacheblend_rag import BlendEngine
from langchain_cacheblend.inventory import Inventory

__all__ = ["Siblings"]

logger = logging.getLogger(__name__)


class Siblings:
    """The other vector stores of this process over an engine; two objects around one inner store are no others to each other.

    Parameters
    ----------
    inner : VectorStore
        What this store wraps.
    engine : BlendEngine
        Its engine, whose other stores will know of it from now on.
    name : str, optional
        What tells its documents from those of other stores, in other processes too; by default its collection, in stores that say
        which one that is, else a name of this process's own.

    Attributes
    ----------
    name : str
        The same.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[BlendEngine, weakref.WeakSet[Siblings]]] = weakref.WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, inner: VectorStore, engine: BlendEngine, name: str | None = None) -> None:
        self._inner = inner
        with self._lock:
            self._family = self._of.setdefault(engine, weakref.WeakSet())
            self.name = name or self._given_name()
            self._family.add(self)

    def texts(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the texts that other stores have under these ids."""
        found: dict[str, str] = {}
        for inner in self._others() if ids else ():
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
                "KV of one text for an id, here of the one that was added last. Give ids that no two stores share, or each store "
                "an engine with a namespace of its own",
                len(taken),
                len(ids),
                taken[0],
            )

    def _given_name(self) -> str:
        kind = type(self._inner).__name__
        own = [each.name for each in self._family if each._inner is self._inner]
        if own:
            return own[0]
        # Chroma's collections have ids of their own; where there is but a name, another database may have it too.
        collection = getattr(getattr(self._inner, "_chroma_collection", None), "id", None)
        if collection is not None:
            return f"{kind} {collection}"
        collection = getattr(self._inner, "collection_name", None)
        name = f"{kind} {collection}"
        taken = not isinstance(collection, str) or any(each.name == name for each in self._family)
        return f"{kind} {uuid.uuid4().hex}" if taken else name

    def _others(self) -> list[VectorStore]:
        with self._lock:
            return [each._inner for each in self._family if each._inner is not self._inner]
