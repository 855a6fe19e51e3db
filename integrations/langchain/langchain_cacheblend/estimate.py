"""What storing the KV of documents would cost."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable

from langchain_core.documents import Document

from cacheblend_rag.engine import WarmEstimate
from langchain_cacheblend.vectorstore import BlendVectorStore, wrapped

__all__ = ["estimate"]


def estimate(
    store: BlendVectorStore,
    documents: Iterable[Document] | None = None,
    text_of: Callable[[Document], str] | None = None,
) -> WarmEstimate:
    """Estimate what encoding documents would cost, in bytes and time, before any are added; nothing is stored.

    A few of them are encoded for that, which takes a few seconds.

    Parameters
    ----------
    store : BlendVectorStore
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

    Raises
    ------
    ConfigError
        If the store is not a `BlendVectorStore`, or cannot list its documents.
    """
    wrapped(store, "estimate")
    if documents is None:
        documents = store.places.in_reading_order(store._inventory.documents())
    rows = [
        (str(document.id or uuid.uuid4()), document.page_content if text_of is None else text_of(document), document)
        for document in documents
    ]
    rows = [row for row in rows if row[1].strip()]
    ids, texts, given = zip(*rows, strict=True) if rows else ((), (), ())
    return store.engine.estimate(store.places.copy().chunks(ids, texts, [document.metadata for document in given]))
