"""Encoding of nodes to stored KV: what the language model is shown of a node, and where that is in its document."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, NodeWithScore, RelatedNodeInfo
from llama_index.core.vector_stores.types import MetadataFilters

from cacheblend_rag.chat.engines import encoding_bar
from cacheblend_rag.chunk import Chunk, document_name
from cacheblend_rag.engine import AddJob, AddResult, Engine, WarmEstimate
from cacheblend_rag.errors import ConfigError, PromptError

__all__ = [
    "Boundary",
    "NodeEncoder",
    "TextOf",
    "ids_above",
    "known_ids",
    "llm_text",
    "node_chunks",
    "placed",
]

logger = logging.getLogger(__name__)


TextOf = Callable[[BaseNode], str | None] | BaseNodePostprocessor
"""Returns what the language model is shown of a node, metadata included; empty or None for a node that has no text. Or the
postprocessor that changes a node's text, as `MetadataReplacementPostProcessor` does for sentence windows.
"""

_WITHOUT = "node %s is stored without KV: %s"
# The keys under which LlamaIndex writes the id of a node's document into every store's metadata.
_DOCUMENT_KEYS = ("document_id", "doc_id", "ref_doc_id")


def llm_text(node: BaseNode) -> str:
    """Return the text of a node as the language model is shown it, metadata included, without space around it.

    LlamaIndex's compact mode strips each node too, so that both modes give the model the same text.
    """
    return node.get_content(metadata_mode=MetadataMode.LLM).strip()


def node_chunks(nodes: Iterable[BaseNode], text_of: TextOf = llm_text) -> list[Chunk]:
    """Return the chunk of each node, named by the node's id, in their order; nodes without text have none.

    `ConfigError` if `text_of` raises, or returns anything but a text or None.
    """
    chunks = []
    for node in nodes:
        name = getattr(text_of, "__name__", type(text_of).__name__)
        try:
            text = _text_after(text_of, node) if isinstance(text_of, BaseNodePostprocessor) else text_of(node)
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


def _text_after(postprocessor: BaseNodePostprocessor, node: BaseNode) -> str:
    """Return the text of a node as the language model is shown it after a postprocessor."""
    # Postprocessors change the node that they are given.
    left = postprocessor.postprocess_nodes([NodeWithScore(node=node.model_copy(deep=True))])
    if len(left) != 1:
        raise ConfigError(f"it leaves {len(left)} nodes of one; text_of takes what changes the text of a node")
    return llm_text(left[0].node)


def _parent(node: BaseNode) -> str | None:
    """Return the id of the node that this one was split from; None for a node of no other."""
    info = node.relationships.get(NodeRelationship.PARENT)
    return info.node_id if isinstance(info, RelatedNodeInfo) else None


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

    def document(self, node: BaseNode, *, is_apart: bool = False) -> str | None:
        """Return the name of a node's document for the engine; None for a node of none.

        The pieces that a parent was split into are a reading of their own: they overlap with it, and where they begin is counted
        from where it does. So is each node that `is_apart`.
        """
        name, parent, is_above = (
            document_name(node.ref_doc_id),
            _parent(node),
            NodeRelationship.CHILD in node.relationships,
        )
        if name is None or not (parent or self._keys or is_above or is_apart):
            return name
        divided = [name, parent, *(node.metadata.get(key) for key in self._keys), *([node.node_id] if is_apart else [])]
        return json.dumps([None, *divided] if is_above else divided, default=str)

    def watch(self, filters: MetadataFilters) -> None:
        """Warn, once for each key, of filters on metadata that divide no document."""
        for key in {*_filter_keys(filters)} - self._declared:
            self._declared.add(key)
            logger.warning(
                "a query is filtered by %r, but a chunk's KV carries traces of other chunks of its document, even of those that "
                "the filter hides. If it is not the same throughout each document, use BlendVectorStore(boundary=[%r]), or "
                "EngineConfig(companions='neutral'), and add the documents again (this warning appears once for each key)",
                key,
                key,
            )


def _filter_keys(filters: MetadataFilters) -> Iterator[str]:
    for each in filters.filters:
        if isinstance(each, MetadataFilters):
            yield from _filter_keys(each)
        else:
            yield each.key


def known_ids(engine: Engine, ref_doc_id: str) -> list[str]:
    """Return the ids of the nodes of a document that an engine knows, without those above others, which a docstore has."""
    return [*engine.document(ref_doc_id), *engine.ids(within=json.dumps([ref_doc_id])[:-1])]


def ids_above(engine: Engine, ref_doc_id: str | None = None) -> list[str]:
    """Return the ids of the nodes above others that an engine knows: of a document, or all."""
    return engine.ids(within=json.dumps([None] if ref_doc_id is None else [None, ref_doc_id])[:-1])


def placed(chunk: Chunk, node: BaseNode, boundary: Boundary, *, is_own: bool = True) -> Chunk:
    """Return the chunk of a node with its document and, if the node says where it begins there, its place.

    A node of which the language model is shown something else than its own text is apart from the others of its document.
    """
    content = node.get_content(metadata_mode=MetadataMode.NONE)
    text = content.strip()
    # Metadata may hold the same words; by LlamaIndex's own template they stand before the text.
    begin = len(chunk.text) - len(text) if chunk.text.endswith(text) else chunk.text.find(text)
    is_apart = not is_own or not text or begin < 0
    document = boundary.document(node, is_apart=is_apart)
    start: int | None = getattr(node, "start_char_idx", None)
    if document is None or is_apart or start is None or start < 0:
        return replace(chunk, document=document)
    start += len(content) - len(content.lstrip())
    return replace(chunk, document=document, start=start, body=(begin, begin + len(text)))


class NodeEncoder:
    """Has an engine compute the KV of nodes, under their ids.

    A node of which no chunk can be made is computed when it is retrieved, and a warning says so.
    """

    def __init__(self, engine: Engine, text_of: TextOf | None, boundary: Boundary) -> None:
        if not (text_of is None or callable(text_of) or isinstance(text_of, BaseNodePostprocessor)):
            raise ConfigError(
                f"text_of={text_of!r} must be a postprocessor, as MetadataReplacementPostProcessor(target_metadata_key=...), or "
                "a function that returns what the language model is shown of a node"
            )
        self.engine = engine
        self.text_of = llm_text if text_of is None else text_of
        self.boundary = boundary

    def encode(
        self,
        nodes: Sequence[BaseNode],
        *,
        show_progress: bool = False,
        background: bool = False,
        gone: Sequence[str] = (),
    ) -> AddResult | AddJob:
        """Encode those nodes that are not stored exactly so, in place of what is `gone` (`BlendEngine.add`); in the background
        when no prompt waits for the model.
        """
        chunks = self._chunks(nodes)
        if lost := {node.node_id for node in nodes} - {chunk.id for chunk in chunks}:
            # An update may have left them so.
            self.engine.delete(lost)

        def refuse(chunk: Chunk, error: PromptError) -> None:
            logger.warning(_WITHOUT, chunk.id, error)

        with encoding_bar(len(nodes), "node") if show_progress and not background else nullcontext() as progress:
            return self.engine.add(chunks, progress=progress, on_refused=refuse, background=background, gone=gone)

    def estimate(self, nodes: Sequence[BaseNode]) -> WarmEstimate:
        """Say what encoding nodes would cost; see `BlendEngine.estimate`."""
        return self.engine.estimate(self._chunks(nodes))

    def _chunks(self, nodes: Sequence[BaseNode]) -> list[Chunk]:
        """Return the nodes' chunks, but of those of which none can be made."""
        chunks: list[Chunk] = []
        for node in nodes:
            try:
                for chunk in node_chunks([node], self.text_of):
                    is_own = self.text_of is llm_text or chunk.text == node.get_content().strip()
                    chunks.append(placed(chunk, node, self.boundary, is_own=is_own))
            except (ConfigError, PromptError) as error:
                logger.warning(_WITHOUT, node.node_id, error)
        return chunks
