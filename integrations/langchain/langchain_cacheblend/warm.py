"""Encoding what a vector store already has, and estimating what encoding would cost."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from langchain_core.documents import Document

from cacheblend_rag.engine import AddJob, AddResult, WarmEstimate
from cacheblend_rag.errors import ConfigError
from langchain_cacheblend.vectorstore import BlendVectorStore

__all__ = ["estimate", "warm"]


def warm(
    vector_store: BlendVectorStore,
    text_of: Callable[[Document], str] | None = None,
    *,
    ids: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> AddResult | AddJob:
    """Encode the documents that a vector store already has, or that reached it another way.

    What is already encoded is not encoded again, so you can call this at every start. Of the sources of these documents,
    chunks that the store no longer has are deleted.

    Parameters
    ----------
    vector_store : BlendVectorStore
        The store; with ``background=True`` the documents are encoded in the background.
    text_of : callable, optional
        Gives the text that the model will see for a document, if that is not its ``page_content``.
    ids : sequence of str, optional
        Only these documents; needed in stores that cannot list what they have (Chroma, InMemory and FAISS can).
    progress : callable, optional
        Called with the number of finished documents and of all, after each batch.

    Returns
    -------
    AddResult or AddJob
        What was done; in the background, a job that reports it. `ConfigError` if documents cannot be listed, or have no ids.
    """
    _check(vector_store, "warm")
    documents = vector_store._inventory.documents(ids)
    nameless = sum(not document.id for document in documents)
    if nameless:
        raise ConfigError(
            f"{nameless} of the {len(documents)} documents of this {type(vector_store.inner).__name__} have no id, so their "
            "chunks cannot be named; add them again with ids"
        )
    texts = [document.page_content if text_of is None else text_of(document) for document in documents]
    metadatas = [document.metadata for document in documents]
    return vector_store.encode([str(document.id) for document in documents], texts, metadatas, progress)


def estimate(
    vector_store: BlendVectorStore,
    documents: Iterable[Document] | None = None,
    text_of: Callable[[Document], str] | None = None,
) -> WarmEstimate:
    """Estimate what encoding documents would cost, in bytes and time, before any are added; nothing is stored.

    A few of them are encoded for that, which takes a few seconds.

    Parameters
    ----------
    vector_store : BlendVectorStore
        The store.
    documents : iterable of Document, optional
        What would be added, split as it would be; by default what the store has already, as for `warm`.
    text_of : callable, optional
        Gives the text that the model will see for a document, if that is not its ``page_content``.

    Returns
    -------
    WarmEstimate
        What is not encoded yet: its `chunks` and `tokens`, and what they would take, `ram_bytes`, `disk_bytes` and `seconds`
        (embedding them not counted).
    """
    _check(vector_store, "estimate")
    given = list(vector_store._inventory.documents() if documents is None else documents)
    ids = [document.id or str(uuid.uuid4()) for document in given]
    texts = [document.page_content if text_of is None else text_of(document) for document in given]
    return vector_store.engine.estimate(vector_store._chunks(ids, texts, [document.metadata for document in given]))


def _check(store: Any, caller: str) -> None:
    """See that a store is one of ours."""
    if not isinstance(store, BlendVectorStore):
        raise ConfigError(
            f"{caller} takes a BlendVectorStore, and this is a {type(store).__name__}; wrap it: "
            "BlendVectorStore(store, engine=...)"
        )
