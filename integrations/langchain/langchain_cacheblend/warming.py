"""Computing the KV of a vector store that exists already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from langchain_core.documents import Document

from cacheblend_rag.engine import AddResult
from cacheblend_rag.errors import ConfigError
from langchain_cacheblend.inventory import Inventory
from langchain_cacheblend.vectorstore import BlendVectorStore

if TYPE_CHECKING:
    from cacheblend_rag.engine import AddJob

__all__ = ["warm"]


def warm(
    store: BlendVectorStore,
    text_of: Callable[[Document], str] | None = None,
    *,
    ids: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> AddResult | AddJob:
    """Encode the documents that a vector store has already, or that came to it by another way.

    What is encoded already is not encoded again, so it can be called at every start. Chunks of documents that the store has no
    longer are no business of this.

    Parameters
    ----------
    store : BlendVectorStore
        The store; with ``background=True`` the documents are encoded in the background.
    text_of : callable, optional
        Gives the text that the model will see for a document, where that is another than its ``page_content``.
    ids : sequence of str, optional
        Only these documents; needed in stores that cannot list what they have (Chroma, InMemory and FAISS can).
    progress : callable, optional
        Called with the number of finished documents and of all, after each batch.

    Returns
    -------
    AddResult or AddJob
        What was done, or in the background what will say it.

    Raises
    ------
    ConfigError
        If the store is no `BlendVectorStore`, cannot list its documents, or documents have no ids.
    """
    if not isinstance(store, BlendVectorStore):
        raise ConfigError(
            f"warm takes a BlendVectorStore, and this is a {type(store).__name__}; wrap it: BlendVectorStore(store, engine=...)"
        )
    documents = store.places.in_reading_order(Inventory(store.inner).documents(ids))
    nameless = sum(not document.id for document in documents)
    if nameless:
        raise ConfigError(
            f"{nameless} of the {len(documents)} documents of this {type(store.inner).__name__} have no id, so that their chunks "
            "cannot be named; add them again with ids"
        )
    texts = [document.page_content if text_of is None else text_of(document) for document in documents]
    return store.encode([str(document.id) for document in documents], texts, [d.metadata for d in documents], progress)
