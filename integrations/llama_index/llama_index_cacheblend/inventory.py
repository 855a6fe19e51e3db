"""Finding out which nodes a vector store holds, before they are gone."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.simple import SimpleVectorStore, SimpleVectorStoreData
from llama_index.core.vector_stores.types import BasePydanticVectorStore, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

__all__ = ["ALL", "Inventory", "Wanted"]

logger = logging.getLogger(__name__)

# LlamaIndex writes the id of a node's document under this key into every store's metadata.
_DOCUMENT = "document_id"
_BATCH = 1000
# Qdrant lists 9999 nodes unless it is told a limit.
_MOST_NODES = 10_000_000


@dataclass(frozen=True, slots=True)
class Wanted:
    """Selection of nodes: those of `node_ids` that are there, that pass `filters`, and that are of this document."""

    node_ids: Sequence[str] | None = None
    filters: MetadataFilters | None = None
    document: str | None = None


ALL = Wanted()
"""All nodes of a store."""


class Inventory:
    """Knows the node ids of a vector store.

    The store itself is asked, since only its answer survives a restart and sees what others did. For one that cannot list its
    nodes, what was added in this process is remembered.
    """

    def __init__(self, store: BasePydanticVectorStore) -> None:
        self._store = store
        self._documents: dict[str, str | None] = {}

    def note(self, nodes: Iterable[BaseNode]) -> None:
        """Remember nodes that were added."""
        self._documents.update({node.node_id: node.ref_doc_id for node in nodes})

    def forget(self, node_ids: Iterable[str]) -> None:
        """Drop what was remembered of nodes."""
        for node_id in node_ids:
            self._documents.pop(node_id, None)

    def remembered(self, document: str | None = None) -> list[str]:
        """Return the ids of the nodes that this process added and has not deleted, all or those of a document."""
        return [
            node_id for node_id, ref_doc_id in self._documents.items() if document is None or ref_doc_id == document
        ]

    def nodes(self) -> list[BaseNode]:
        """Return all nodes, from a store that keeps them; `NotImplementedError` if it cannot list them."""
        [query] = _queries(self._store.get_nodes, ALL)
        return list(self._store.get_nodes(**query))

    def find(self, wanted: Wanted = ALL) -> list[str] | None:
        """Return the ids of nodes, in no order; None if the store cannot list them."""
        if isinstance(self._store, SimpleVectorStore):
            return _in_simple_store(self._store.data, wanted)
        try:
            queries = _queries(self._store.get_nodes, wanted)
            return [node.node_id for query in queries for node in self._store.get_nodes(**query)]
        except Exception as error:
            return self._remembered(error, wanted)

    async def afind(self, wanted: Wanted = ALL) -> list[str] | None:
        """Find asynchronously; see `find`."""
        if isinstance(self._store, SimpleVectorStore):
            return _in_simple_store(self._store.data, wanted)
        try:
            queries = _queries(self._store.aget_nodes, wanted)
            return [node.node_id for query in queries for node in await self._store.aget_nodes(**query)]
        except Exception as error:
            return self._remembered(error, wanted)

    def _remembered(self, error: Exception, wanted: Wanted) -> list[str] | None:
        # Asking must not keep a user from adding or deleting, whatever a store raises. Which ids are there is only asked before
        # adding, when some stores have no collection yet.
        is_expected = wanted.node_ids is not None or isinstance(error, NotImplementedError)
        level = logging.DEBUG if is_expected else logging.WARNING
        logger.log(level, "%s could not be asked for its nodes: %s", type(self._store).__name__, error)
        if wanted.filters is not None or wanted.node_ids is not None:
            return None
        return self.remembered(wanted.document)


def _in_simple_store(data: SimpleVectorStoreData, wanted: Wanted) -> list[str]:
    """Return node ids of LlamaIndex's own store, which keeps no nodes but all their metadata."""
    # A store that was persisted by an old version has no metadata, and no filter passes there.
    passes = build_metadata_filter_fn(lambda node_id: data.metadata_dict.get(node_id, {}), wanted.filters)
    ids = data.embedding_dict if wanted.node_ids is None else wanted.node_ids
    return [
        id
        for id in ids
        if id in data.embedding_dict
        and passes(id)
        and (wanted.document is None or data.text_id_to_ref_doc_id.get(id) == wanted.document)
    ]


def _queries(list_nodes: Callable[..., Any], wanted: Wanted) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a store's method that lists nodes: ids in lists that every store can take."""
    filters, node_ids = wanted.filters, wanted.node_ids
    if wanted.document is not None:
        filters = MetadataFilters(filters=[MetadataFilter(key=_DOCUMENT, value=wanted.document)])
    if node_ids is None:
        # The keyword that keeps a store from leaving nodes out, if it takes one.
        limit = {"limit": _MOST_NODES} if "limit" in inspect.signature(list_nodes).parameters else {}
        yield {"node_ids": None, "filters": filters, **limit}
        return
    for start in range(0, len(node_ids), _BATCH):
        yield {"node_ids": list(node_ids[start : start + _BATCH]), "filters": filters}
