"""What of a node the language model sees, and the chunk that makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llama_index.core.schema import BaseNode, MetadataMode

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.errors import ConfigError

__all__ = ["SEPARATOR", "TextOf", "llm_text", "node_chunks"]

SEPARATOR = "\n\n"
"""What stands between two nodes in a prompt, as in LlamaIndex's compact mode."""

TextOf = Callable[[BaseNode], str | None]
"""Returns what the language model is shown of a node, metadata included; empty or None for a node that has no text."""


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

    Raises
    ------
    ConfigError
        If `text_of` raises, or returns anything but a text or None.
    """
    texts = ((node.node_id, _read(node, text_of)) for node in nodes)
    return [Chunk(text=text, id=node_id) for node_id, text in texts if text]


def _read(node: BaseNode, text_of: TextOf) -> str:
    name = getattr(text_of, "__name__", type(text_of).__name__)
    try:
        text = text_of(node)
    except Exception as error:
        raise ConfigError(
            f"what the language model is shown of node {node.node_id!r} cannot be read: {name} raised {error!r}"
        ) from error
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ConfigError(
            f"what the language model is shown of node {node.node_id!r} must be a text or None, and {name} returned an object "
            f"of type {type(text).__name__}"
        )
    return text.strip()
