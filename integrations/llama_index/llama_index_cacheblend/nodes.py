"""From nodes to chunks: what the language model is shown of a node, and where in its document that stands."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace

from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, RelatedNodeInfo
from llama_index.core.vector_stores.types import MetadataFilters

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.errors import ConfigError

__all__ = ["SEPARATOR", "Boundary", "TextOf", "llm_text", "node_chunks", "placed", "related"]

logger = logging.getLogger(__name__)

SEPARATOR = "\n\n"
"""What stands between two nodes in a prompt, as in LlamaIndex's compact mode."""

TextOf = Callable[[BaseNode], str | None]
"""Returns what the language model is shown of a node, metadata included; empty or None for a node that has no text."""

# The keys under which LlamaIndex writes the id of a node's document into every store's metadata.
_DOCUMENT_KEYS = ("document_id", "doc_id", "ref_doc_id")


def llm_text(node: BaseNode) -> str:
    """Return the text of a node as the language model is shown it, metadata included, without space around it.

    LlamaIndex's compact mode strips each node too, so that both modes give the model the same text.
    """
    return node.get_content(metadata_mode=MetadataMode.LLM).strip()


def node_chunks(nodes: Iterable[BaseNode], text_of: TextOf = llm_text) -> list[Chunk]:
    """Return the chunk of each node, named by the node's id, in their order; nodes without text have none.

    Parameters
    ----------
    nodes : iterable of BaseNode
        The nodes.
    text_of : callable, optional
        What the language model is shown of a node, if a postprocessor changes it; space around it does not count.

    Raises
    ------
    ConfigError
        If `text_of` raises, or returns anything but a text or None.
    """
    chunks = []
    for node in nodes:
        name = getattr(text_of, "__name__", type(text_of).__name__)
        try:
            text = text_of(node)
        except Exception as error:
            raise ConfigError(
                f"what the language model is shown of node {node.node_id!r} cannot be read: {name} raised {error!r}"
            ) from error
        if not isinstance(text, str | None):
            raise ConfigError(
                f"what the language model is shown of node {node.node_id!r} must be a text or None, and {name} returned an "
                f"object of type {type(text).__name__}"
            )
        if text and text.strip():
            chunks.append(Chunk(text.strip(), node.node_id))
    return chunks


class Boundary:
    """Names the document that a node is a piece of.

    Nodes with different values of the metadata named by `keys` are of different documents; `ConfigError` if these are no names.
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
        for key in set(_filter_keys(filters)) - self._declared if filters is not None else ():
            self._declared.add(key)
            logger.warning(
                "a query is filtered by %r: a chunk's KV carries traces of what stands before it in its document, also of chunks "
                "that this filter keeps from the reader. Give BlendVectorStore(boundary=[%r]), which divides documents where it "
                "changes, or context='none', which encodes each chunk alone, and add the documents again. Where it is the same "
                "throughout each document there are no such traces, and naming it costs nothing (said once for each key)",
                key,
                key,
            )


def placed(chunk: Chunk, node: BaseNode, boundary: Boundary, followers: Container[str]) -> Chunk:
    """Return the chunk of a node with its place in its document.

    It stays as it is where the node comes from no document, or its own text is not in what the language model is shown of it.
    `followers` are the ids that nodes added before, or with it, name as the next in their documents.
    """
    document = boundary.document(node)
    content = node.get_content(metadata_mode=MetadataMode.NONE)
    text = content.strip()
    # Metadata may hold the same words; by LlamaIndex's own template they stand before the text.
    begin = len(chunk.text) - len(text) if chunk.text.endswith(text) else chunk.text.find(text)
    if document is None or not text or begin < 0:
        return chunk
    previous = related(node, NodeRelationship.PREVIOUS)
    # A parser counts from the beginning of the text that it was given. Behind another parser that is a section of the document,
    # and nothing says so but this: LlamaIndex then notes for each node the previous one, and for none the next. Of a document's
    # last node that shows in its predecessor.
    is_first = NodeRelationship.PREVIOUS not in node.relationships
    is_linked = not {NodeRelationship.PARENT, NodeRelationship.NEXT}.isdisjoint(node.relationships)
    start: int | None = getattr(node, "start_char_idx", None)
    if start is None or start < 0 or not (is_first or is_linked or node.node_id in followers):
        start = None
    else:
        start += len(content) - len(content.lstrip())
    return replace(chunk, document=document, start=start, previous=previous, body=(begin, begin + len(text)))


def related(node: BaseNode, where: NodeRelationship) -> str | None:
    """Return the id of the node that stands somewhere from this one; None where there is none."""
    info = node.relationships.get(where)
    return info.node_id if isinstance(info, RelatedNodeInfo) and info.node_id not in ("", node.node_id) else None


def _filter_keys(filters: MetadataFilters) -> Iterator[str]:
    for each in filters.filters:
        if isinstance(each, MetadataFilters):
            yield from _filter_keys(each)
        else:
            yield each.key
