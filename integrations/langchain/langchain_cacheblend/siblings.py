"""Vector stores over one engine, whose documents share its names."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

from langchain_core.vectorstores import VectorStore

from cacheblend_rag import BlendEngine
from langchain_cacheblend.inventory import Inventory

__all__ = ["Siblings"]

logger = logging.getLogger(__name__)


class _Store(Protocol):
    """A store of documents whose KV an engine has."""

    @property
    def inner(self) -> VectorStore: ...

    @property
    def engine(self) -> BlendEngine: ...


_stores: weakref.WeakKeyDictionary[BlendEngine, weakref.WeakSet[_Store]] = weakref.WeakKeyDictionary()
_stores_lock = threading.Lock()


class Siblings:
    """The other stores of this process over a store's engine; two that wrap one inner store are no others to each other.

    Parameters
    ----------
    store : BlendVectorStore
        The store, which the others will know of from now on.
    """

    def __init__(self, store: _Store) -> None:
        self._store = weakref.ref(store)
        self._engine = weakref.ref(store.engine)
        with _stores_lock:
            _stores.setdefault(store.engine, weakref.WeakSet()).add(store)

    def texts(self, ids: Sequence[str]) -> dict[str, str]:
        """Return the texts that other stores have under these ids."""
        found: dict[str, str] = {}
        for other in self._others() if ids else ():
            try:
                documents = Inventory(other.inner).documents(ids)
            except Exception as error:  # whatever a store raises that is closed, or cannot be asked
                logger.debug("%s was not asked for its documents: %s", type(other.inner).__name__, error)
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

    def _others(self) -> list[_Store]:
        own, engine = self._store(), self._engine()
        with _stores_lock:
            stores = [] if own is None or engine is None else list(_stores.get(engine, ()))
        return [store for store in stores if own is not None and store.inner is not own.inner]
