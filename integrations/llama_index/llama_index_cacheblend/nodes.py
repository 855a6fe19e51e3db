"""What of a node the language model sees, and the chunk that makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llama_index.core.schema import BaseNode, MetadataMode

from cacheblend_rag.chunk import Chunk

__all__ = ["TextOf", "llm_text", "node_chunks"]

TextOf = Callable[[BaseNode], str]
"""Returns what the language model is shown of a node, metadata included; empty for a node that has no text."""


def llm_text(node: BaseNode) -> str:
    """Return the text of a node as the language model is shown it, metadata included, without space around it.

    LlamaIndex's compact mode strips each node too, so that both modes give the model the same text.

    Parameters
    ----------
    node : BaseNode
        The node.

    Returns
    -------
    str
        The text; empty for a node that has none, an image for example.
    """
    return node.get_content(metadata_mode=MetadataMode.LLM).strip()


def node_chunks(nodes: Iterable[BaseNode], text_of: TextOf = llm_text) -> list[Chunk]:
    """Return the chunk of each node, named by the node's id; nodes without text have none.

    Parameters
    ----------
    nodes : iterable of BaseNode
        The nodes.
    text_of : callable, optional
        What the language model is shown of a node, if a postprocessor changes it; space around it does not count.

    Returns
    -------
    list of Chunk
        The chunks, in the order of the nodes.
    """
    texts = ((node.node_id, text_of(node).strip()) for node in nodes)
    return [Chunk(text=text, id=node_id) for node_id, text in texts if text]
