"""Encoding of nodes to stored KV: what the language model is shown of a node, and where that is in its document."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, NodeWithScore, RelatedNodeInfo
from llama_index.core.storage.docstore.types import BaseDocumentStore
from llama_index.core.vector_stores.types import MetadataFilters

from cacheblend_rag.chunk import Chunk, document_name, text_hash
from cacheblend_rag.engine import AddJob, AddResult, Engine, WarmEstimate
from cacheblend_rag.errors import BackendError, ConfigError, PromptError, StoreError

__all__ = [
    "Boundary",
    "EncodedNodes",
    "NodeEncoder",
    "Progress",
    "TextOf",
    "llm_text",
    "node_chunks",
    "parents_of",
    "placed",
]

logger = logging.getLogger(__name__)


TextOf = Callable[[BaseNode], str | None] | BaseNodePostprocessor
"""Returns what the language model is shown of a node, metadata included; empty or None for a node that has no text. Or the
postprocessor that changes a node's text, as `MetadataReplacementPostProcessor` does for sentence windows.
"""

Progress = Callable[[int, int], None]
"""Called with the number of finished nodes, and of all."""

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
    text_of : callable or BaseNodePostprocessor, optional
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
            # What was made of a node for one query, a citation, has its document but no place in it.
            is_piece = getattr(node, "start_char_idx", None) is not None or NodeRelationship.CHILD in node.relationships
            chunks.append(Chunk(text.strip(), node.node_id, source=node.ref_doc_id if is_piece else None))
    return chunks


def _text_after(postprocessor: BaseNodePostprocessor, node: BaseNode) -> str:
    """Return the text of a node as the language model is shown it after a postprocessor."""
    # Postprocessors change the node that they are given.
    left = postprocessor.postprocess_nodes([NodeWithScore(node=node.model_copy(deep=True))])
    if len(left) != 1:
        raise ConfigError(f"it leaves {len(left)} nodes of one; text_of takes what changes the text of a node")
    return llm_text(left[0].node)


def parents_of(nodes: Iterable[BaseNode], docstore: BaseDocumentStore) -> list[BaseNode]:
    """Return what a docstore has of the nodes above these, up to those that have no parent.

    Parents that are not there are named in a warning: LlamaIndex's `AutoMergingRetriever` could not find them either.
    """
    parents: list[BaseNode] = []
    missing: list[str] = []
    seen: set[str] = set()
    level = list(nodes)
    while level:
        named = dict.fromkeys(_related(node, NodeRelationship.PARENT) for node in level)
        wanted = [node_id for node_id in named if node_id is not None and node_id not in seen]
        seen.update(wanted)
        level = docstore.get_nodes(wanted, raise_error=False)
        missing += set(wanted).difference(node.node_id for node in level)
        parents += level
    if missing:
        logger.warning(
            "%d parents of nodes, %r for one, are not in the docstore, so they are not encoded; add all nodes to the docstore "
            "before their leaves are added to the index",
            len(missing),
            missing[0],
        )
    return parents


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
        self._declared: dict[str, object] = dict.fromkeys([*keys, *_DOCUMENT_KEYS])

    def document(self, node: BaseNode) -> str | None:
        """Return the name of a node's document for the engine; None for a node of none.

        The pieces that a parent was split into are a reading of their own: they overlap with it, and where they begin is counted
        from where it does.
        """
        parent = node.relationships.get(NodeRelationship.PARENT)
        parent_id = parent.node_id if isinstance(parent, RelatedNodeInfo) else None
        name = document_name(node.ref_doc_id)
        if name is None or (parent_id is None and not self._keys):
            return name
        values = [node.metadata.get(key) for key in self._keys]
        return json.dumps([node.ref_doc_id, parent_id, *values], default=str)

    def watch(self, filters: MetadataFilters) -> None:
        """Warn, once for each key, of filters on metadata that divide no document."""
        mine = object()
        for key in set(_filter_keys(filters)):
            # One call, which threads cannot get between.
            if self._declared.setdefault(key, mine) is not mine:
                continue
            logger.warning(
                "a query is filtered by %r: a chunk's KV carries traces of other chunks of its document, even of such as this "
                "filter hides from the reader. Use BlendVectorStore(boundary=[%r]), which divides documents where it changes, or "
                "EngineConfig(companions='neutral'), which keeps each chunk to itself, and add the documents again. If it is the "
                "same throughout "
                "each document, there are no such traces, and naming it costs nothing (this warning appears once for each key)",
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
    # A parser counts from the beginning of the text that it was given. After another parser that is a section of the document,
    # and nothing says so but this: LlamaIndex then notes for each node the previous one, and for none the next. Of a document's
    # last node that shows in its predecessor.
    is_first = NodeRelationship.PREVIOUS not in node.relationships
    is_linked = not {NodeRelationship.PARENT, NodeRelationship.NEXT}.isdisjoint(node.relationships)
    start: int | None = getattr(node, "start_char_idx", None)
    if start is None or start < 0 or not (is_first or is_linked or node.node_id in followers):
        start = None
    else:
        start += len(content) - len(content.lstrip())
    return replace(chunk, document=document, start=start, body=(begin, begin + len(text)))


def _related(node: BaseNode, where: NodeRelationship) -> str | None:
    """Return the id of the node that stands somewhere from this one; None where there is none."""
    info = node.relationships.get(where)
    return info.node_id if isinstance(info, RelatedNodeInfo) and info.node_id not in ("", node.node_id) else None


def _filter_keys(filters: MetadataFilters) -> Iterator[str]:
    for each in filters.filters:
        if isinstance(each, MetadataFilters):
            yield from _filter_keys(each)
        else:
            yield each.key


@dataclass(frozen=True, slots=True)
class EncodedNodes:
    """Result of encoding some nodes: what the engine did, or will have done in the background; None if it stored less.

    `without_text` are the nodes that show the language model nothing, `failed` the others without KV, and why.
    """

    done: AddResult | AddJob | None
    without_text: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)


class NodeEncoder:
    """Has an engine compute the KV of nodes, under their ids.

    Nothing that is wrong with a node, or with the place where KV is kept, is an error here: the node is computed when it is
    retrieved, and a warning says so. A node of which the model is shown something else than LlamaIndex writes (`text_of`) is
    of no document, since its place in it is unknown; without a `boundary`, none is of any.
    """

    def __init__(
        self,
        engine: Engine,
        text_of: TextOf | None = None,
        boundary: Boundary | None = None,
    ) -> None:
        if not (text_of is None or callable(text_of) or isinstance(text_of, BaseNodePostprocessor)):
            raise ConfigError(
                f"text_of={text_of!r} must be a postprocessor, as MetadataReplacementPostProcessor(target_metadata_key=...), or "
                "a function that returns what the language model is shown of a node"
            )
        self.engine = engine
        self.text_of = llm_text if text_of is None else text_of
        self.boundary = boundary
        # Documents may be cut by the end of a call: what is said to come next, and has not come yet.
        self._awaited: set[str] = set()

    def encode(
        self, nodes: Sequence[BaseNode], *, progress: Progress | None = None, background: bool = False
    ) -> EncodedNodes:
        """Encode those nodes that are not stored exactly so; `progress` counts those with text.

        In the background it returns when they are named, and they are encoded when no prompt waits for the model.
        """
        chunks, failed = self._read(nodes)
        with_text = {chunk.id for chunk in chunks}
        without_text = tuple(node.node_id for node in nodes if node.node_id not in with_text | failed.keys())
        if without_text or failed:
            # An update may have left them so.
            self.engine.delete([*without_text, *failed])

        def refuse(chunk: Chunk, error: PromptError) -> None:
            logger.warning("node %s is stored without KV: %s", chunk.id, error)
            failed[str(chunk.id)] = str(error)

        try:
            done = self.engine.add(chunks, progress=progress, on_refused=refuse, background=background)
        # A full disk, a server that is away, or a device without memory for a batch; torch has no class of its own for what
        # devices raise.
        except (BackendError, StoreError, MemoryError, RuntimeError) as error:
            chunks = [chunk for chunk in chunks if chunk.id not in failed]
            return EncodedNodes(None, without_text, failed | self._not_stored(chunks, error))
        return EncodedNodes(done, without_text, failed)

    def estimate(self, nodes: Sequence[BaseNode]) -> WarmEstimate:
        """Say what encoding nodes would cost; see `BlendEngine.estimate`."""
        # What reading them teaches is forgotten again.
        chunks, _ = copy(self)._read(nodes)
        return self.engine.estimate(chunks)

    def _read(self, nodes: Sequence[BaseNode]) -> tuple[list[Chunk], dict[str, str]]:
        """Return the nodes' chunks, and the nodes of which none can be made, and why."""
        chunks: list[Chunk] = []
        failed: dict[str, str] = {}
        named = {_related(node, NodeRelationship.NEXT) for node in nodes}
        followers = self._awaited | {node_id for node_id in named if node_id is not None}
        for node in nodes:
            try:
                for chunk in node_chunks([node], self.text_of):
                    is_own = self.text_of is llm_text or chunk.text == node.get_content().strip()
                    if self.boundary is not None and is_own:
                        chunk = placed(chunk, node, self.boundary, followers)
                    is_above = NodeRelationship.CHILD in node.relationships
                    # The latter are in a docstore, to merge others into.
                    chunks.append(replace(chunk, source=node.ref_doc_id, indexed=not is_above))
            except (ConfigError, PromptError) as error:
                failed[node.node_id] = str(error)
        self._awaited = followers - {node.node_id for node in nodes}
        if failed:
            logger.warning(
                "%d of %d nodes are stored without KV: %s", len(failed), len(nodes), next(iter(failed.values()))
            )
        return chunks, failed

    def _not_stored(self, chunks: Sequence[Chunk], error: Exception) -> dict[str, str]:
        """Return the chunks that were not stored; KV of a text that one of them replaced is deleted."""
        try:
            records = self.engine.records([str(chunk.id) for chunk in chunks])
        except BackendError:
            records = [None] * len(chunks)
        missing = [
            (chunk, record)
            for chunk, record in zip(chunks, records, strict=True)
            if record is None or record.text_hash != text_hash(chunk.text)
        ]
        logger.warning(
            "the KV of %d of %d nodes was not stored and is computed at query time: %s",
            len(missing),
            len(chunks),
            error,
        )
        with suppress(BackendError, StoreError):
            self.engine.delete([str(chunk.id) for chunk, record in missing if record is not None])
        return {str(chunk.id): str(error) for chunk, _ in missing}
