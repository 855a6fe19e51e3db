"""What divides a document whose parts have different readers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence

from llama_index.core.schema import BaseNode, NodeRelationship, RelatedNodeInfo
from llama_index.core.vector_stores.types import MetadataFilters

from cacheblend_rag.errors import ConfigError

__all__ = ["Boundary"]

logger = logging.getLogger(__name__)

# The keys under which LlamaIndex writes the id of a node's document into every store's metadata.
_DOCUMENT_KEYS = ("document_id", "doc_id", "ref_doc_id")


class Boundary:
    """Names the document that a node is a piece of: nodes with different values of some metadata are of different documents.

    Parameters
    ----------
    keys : sequence of str
        Those metadata.

    Raises
    ------
    ConfigError
        If `keys` is no sequence of names.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        if isinstance(keys, str) or not all(isinstance(key, str) and key for key in keys):
            raise ConfigError(
                f'boundary={keys!r} must be a list of the names of metadata, as in boundary=["tenant"]; leave it out for none'
            )
        self._keys = tuple(keys)
        self._declared = {*keys, *_DOCUMENT_KEYS}

    def document(self, node: BaseNode) -> str | None:
        """Return the name of a node's document for the engine; None for a node of none.

        The pieces that a parent was split into are a reading of their own: they overlap with it, and where they begin is counted
        from where it does.
        """
        parent = node.relationships.get(NodeRelationship.PARENT)
        parent_id = parent.node_id if isinstance(parent, RelatedNodeInfo) else None
        if not node.ref_doc_id or (parent_id is None and not self._keys):
            return node.ref_doc_id or None
        values = [node.metadata.get(key) for key in self._keys]
        return json.dumps([node.ref_doc_id, parent_id, *values], default=str)

    def watch(self, filters: MetadataFilters | None) -> None:
        """Warn, once for each key, of filters on metadata that divide no document."""
        for key in set(_keys(filters)) - self._declared:
            self._declared.add(key)
            logger.warning(
                "a query is filtered by %r: a chunk's KV carries traces of what stands before it in its document, also of chunks "
                "that this filter keeps from the reader. Give BlendVectorStore(boundary=[%r]), which divides documents where it "
                "changes, or context='none', which encodes each chunk alone, and add the documents again. Where it is the same "
                "throughout each document there are no such traces, and naming it costs nothing (said once for each key)",
                key,
                key,
            )


def _keys(filters: MetadataFilters | None) -> Iterator[str]:
    for each in filters.filters if filters is not None else ():
        if isinstance(each, MetadataFilters):
            yield from _keys(each)
        else:
            yield each.key
