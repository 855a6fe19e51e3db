"""Where in its document a node's text stands."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, RelatedNodeInfo

from cacheblend_rag.chunk import Chunk
from llama_index_cacheblend.boundary import Boundary

__all__ = ["placed", "related"]


def placed(chunk: Chunk, node: BaseNode, boundary: Boundary, followers: Container[str]) -> Chunk:
    """Return the chunk of a node with its place in its document.

    Parameters
    ----------
    chunk : Chunk
        What the language model is shown of the node: its own text, and perhaps metadata before or behind it.
    node : BaseNode
        The node.
    boundary : Boundary
        Names the document.
    followers : container of str
        The ids that nodes added before, or with it, name as the next in their documents.

    Returns
    -------
    Chunk
        The same chunk with a place; as it is where the node comes from no document, or its own text is not in what is shown.
    """
    document = boundary.document(node)
    content = node.get_content(metadata_mode=MetadataMode.NONE)
    text = content.strip()
    # Metadata may hold the same words; by LlamaIndex's own template they stand before the text.
    begin = len(chunk.text) - len(text) if chunk.text.endswith(text) else chunk.text.find(text)
    if document is None or not text or begin < 0:
        return chunk
    start = _start(node, followers)
    return replace(
        chunk,
        document=document,
        start=None if start is None else start + len(content) - len(content.lstrip()),
        previous=related(node, NodeRelationship.PREVIOUS),
        body=(begin, begin + len(text)),
    )


def _start(node: BaseNode, followers: Container[str]) -> int | None:
    """Return where a node begins in its document, or in its parent; None where that is not known.

    A parser counts from the beginning of the text that it was given. Behind another parser that is a section of the document,
    and nothing says so but this: LlamaIndex then notes for each node the previous one, and for none the next. Of a document's
    last node that shows in its predecessor.
    """
    start: int | None = getattr(node, "start_char_idx", None)
    if start is None or start < 0:
        return None
    is_first = NodeRelationship.PREVIOUS not in node.relationships
    is_linked = not {NodeRelationship.PARENT, NodeRelationship.NEXT}.isdisjoint(node.relationships)
    return start if is_first or is_linked or node.node_id in followers else None


def related(node: BaseNode, where: NodeRelationship) -> str | None:
    """Return the id of the node that stands somewhere from this one; None where there is none."""
    info = node.relationships.get(where)
    known = isinstance(info, RelatedNodeInfo) and info.node_id not in ("", node.node_id)
    return info.node_id if known else None  # type: ignore[union-attr]
