"""A vector store that has the KV of what it holds computed on the way in."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.simple import SimpleVectorStore, SimpleVectorStoreData
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

from cacheblend_rag.engine import ChunkCollection, Engine
from cacheblend_rag.errors import BackendError, ConfigError, StoreError
from llama_index_cacheblend.llm import BlendLLM, find_engine
from llama_index_cacheblend.nodes import Boundary, NodeEncoder, TextOf, ids_above, known_ids

__all__ = ["BlendVectorStore", "listed_ids", "listed_nodes"]

logger = logging.getLogger(__name__)

_BATCH = 1000
# Qdrant lists 9999 nodes unless it is told a limit.
_MOST_NODES = 10_000_000


def listed_nodes(store: BasePydanticVectorStore) -> list[BaseNode]:
    """Return all nodes of a store that keeps them; `NotImplementedError` if it cannot."""
    [query] = _queries(store.get_nodes, None, None)
    return list(store.get_nodes(**query))


def listed_ids(
    store: BasePydanticVectorStore, node_ids: Sequence[str] | None = None, filters: MetadataFilters | None = None
) -> list[str] | None:
    """Return the ids of all nodes of a store, or of those of some ids or that pass a filter; None if it cannot list them."""
    if isinstance(store, SimpleVectorStore):
        return _in_simple_store(store.data, node_ids, filters)
    try:
        return [
            node.node_id for query in _queries(store.get_nodes, node_ids, filters) for node in store.get_nodes(**query)
        ]
    except Exception as error:
        # Asking must not keep a user from adding or deleting, whatever a store raises.
        logger.debug("%s could not be asked for its nodes: %s", type(store).__name__, error)
        return None


async def _alisted_ids(
    store: BasePydanticVectorStore, node_ids: Sequence[str] | None = None, filters: MetadataFilters | None = None
) -> list[str] | None:
    if isinstance(store, SimpleVectorStore):
        return _in_simple_store(store.data, node_ids, filters)
    try:
        queries = _queries(store.aget_nodes, node_ids, filters)
        return [node.node_id for query in queries for node in await store.aget_nodes(**query)]
    except Exception as error:
        logger.debug("%s could not be asked for its nodes: %s", type(store).__name__, error)
        return None


def _in_simple_store(
    data: SimpleVectorStoreData, node_ids: Sequence[str] | None, filters: MetadataFilters | None
) -> list[str]:
    """Return node ids of LlamaIndex's own store, which keeps no nodes but all their metadata."""
    # A store that was persisted by an old version has no metadata, and no filter passes there.
    passes = build_metadata_filter_fn(lambda node_id: data.metadata_dict.get(node_id, {}), filters)
    ids = data.embedding_dict if node_ids is None else node_ids
    return [id for id in ids if id in data.embedding_dict and passes(id)]


def _of_document(ref_doc_id: str) -> MetadataFilters:
    # LlamaIndex writes the id of a node's document under this key into every store's metadata.
    return MetadataFilters(filters=[MetadataFilter(key="document_id", value=ref_doc_id)])


def _queries(
    list_nodes: Callable[..., Any], node_ids: Sequence[str] | None, filters: MetadataFilters | None
) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a store's method that lists nodes: ids in lists that every store can take."""
    if node_ids is None:
        # The keyword that keeps a store from leaving nodes out, if it takes one.
        limit = {"limit": _MOST_NODES} if "limit" in inspect.signature(list_nodes).parameters else {}
        yield {"node_ids": None, "filters": filters, **limit}
        return
    for start in range(0, len(node_ids), _BATCH):
        yield {"node_ids": list(node_ids[start : start + _BATCH]), "filters": filters}


class BlendVectorStore(BasePydanticVectorStore):
    """A vector store whose nodes are also chunks of an engine, under their node ids.

    Adding encodes, deleting deletes KV, and the inner store does the rest. A node whose id already exists replaces the
    old one, text and KV, even in stores that would silently keep the old text. A node that has lost its KV is encoded when it is
    first retrieved; one that reached the inner store another way is stored by `warm_index`, and until then kept in RAM.

    A node is read behind another node of its document (``ref_doc_id``) and, if nodes say where they begin there
    (``start_char_idx``), the end of what precedes it; a node without a document, behind a neutral passage
    (`EngineConfig.companions`).

    Parameters
    ----------
    inner : BasePydanticVectorStore
        The store that keeps and finds the nodes.
    engine : BlendEngine or ServedEngine or BlendLLM, optional
        Where their KV is computed and kept, `BlendLLM.engine` for example; by default that of ``Settings.llm``.
    server : str, optional
        The address of a server whose engine it is, instead of `engine`.
    show_progress : bool
        Whether to show a progress bar.
    background : bool
        Whether nodes are added before they are encoded, which then happens in the background and without a bar; `flush`
        waits for it.
    text_of : BaseNodePostprocessor or callable, optional
        The postprocessor that changes what the language model sees of a node, `MetadataReplacementPostProcessor` for
        sentence windows, or a function that returns it; by default a node's text and metadata as LlamaIndex writes them. Nodes
        shown in another form are read behind none of their document.
    boundary : sequence of str
        Metadata keys; nodes of one document with different values are treated as different documents. If filters on metadata
        tell readers apart, name their keys here.

    Raises
    ------
    ConfigError
        If `inner` is not a vector store of LlamaIndex or wraps one already, there is no engine, or `boundary` is given where the
        engine reads nodes behind any others (`companions` "similar").
    """

    stores_text: bool = True

    _inner: BasePydanticVectorStore = PrivateAttr()
    _encoder: NodeEncoder = PrivateAttr()
    _show_progress: bool = PrivateAttr()
    _background: bool = PrivateAttr()
    _collection: ChunkCollection = PrivateAttr()

    def __init__(
        self,
        inner: BasePydanticVectorStore,
        *,
        engine: Engine | BlendLLM | None = None,
        server: str | None = None,
        show_progress: bool = False,
        background: bool = False,
        text_of: TextOf | None = None,
        boundary: Sequence[str] = (),
    ) -> None:
        if not isinstance(inner, BasePydanticVectorStore) or isinstance(inner, BlendVectorStore):
            raise ConfigError(
                f"inner is a {type(inner).__name__}; give a LlamaIndex vector store, as ChromaVectorStore(...), or what a "
                "BlendVectorStore wraps, BlendVectorStore(store.inner, ...)"
            )
        found = find_engine(engine, server)
        if found.config.companions == "similar" and boundary:
            raise ConfigError(
                'boundary says which nodes may know of each other, but with companions="similar" the engine reads every node '
                'behind any other; give it companions="own"'
            )
        super().__init__(stores_text=inner.stores_text, is_embedding_query=inner.is_embedding_query)
        self._inner = inner
        self._show_progress = show_progress
        self._background = background
        self._collection = ChunkCollection(found, self._present)
        self._encoder = NodeEncoder(found, text_of, Boundary(boundary))

    @property
    def client(self) -> Any:
        """The inner store's client."""
        return self._inner.client

    @property
    def inner(self) -> BasePydanticVectorStore:
        """The store that keeps and finds the nodes."""
        return self._inner

    @property
    def engine(self) -> Engine:
        """Engine that computes and keeps the KV."""
        return self._encoder.engine

    @property
    def encoder(self) -> NodeEncoder:
        """Encoder that computes the KV, and knows what the language model is shown of a node."""
        return self._encoder

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Encode nodes, then add them to the inner store; those that are there already are replaced.

        A node is added even if its KV cannot be stored: a node beyond the model's window, or KV for which the disk has no room,
        is computed at query time, and a warning gives the reason. Other keywords are the inner store's.
        """
        nodes = list(nodes)
        node_ids = [node.node_id for node in nodes]
        self._encode(nodes)
        try:
            # A store may have no collection yet, or delete no single nodes. Whatever else is wrong, it says when it is added to.
            with suppress(Exception):
                self._inner.delete_nodes(node_ids)
            return self._inner.add(nodes, **kwargs)
        except BaseException:
            self.engine.delete(node_ids)
            raise

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes asynchronously; see `add`."""
        nodes = list(nodes)
        node_ids = [node.node_id for node in nodes]
        await asyncio.to_thread(self._encode, nodes)
        try:
            with suppress(Exception):
                await self._inner.adelete_nodes(node_ids)
            return await self._inner.async_add(nodes, **kwargs)
        except BaseException:
            await asyncio.to_thread(self.engine.delete, node_ids)
            raise

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete the nodes of a document, and forget all KV of it that no other vector store of this process has."""
        # Some may have been named without their document.
        found = listed_ids(self._inner, filters=_of_document(ref_doc_id))
        self._inner.delete(ref_doc_id, **delete_kwargs)
        self._forget_document(ref_doc_id, found or [])

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document asynchronously; see `delete`."""
        found = await _alisted_ids(self._inner, filters=_of_document(ref_doc_id))
        await self._inner.adelete(ref_doc_id, **delete_kwargs)
        await asyncio.to_thread(self._forget_document, ref_doc_id, found or [])

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete nodes by id, by filter, or those of the ids that pass the filter, and forget their KV.

        Without ids and filters the inner store says what is deleted; all KV is forgotten, since some take that for all nodes.
        """
        listed = node_ids is not None and filters is None
        found = node_ids if listed else listed_ids(self._inner, node_ids, filters)
        if filters is None or found is None:
            self._inner.delete_nodes(node_ids, filters, **delete_kwargs)
        elif found:
            # By name, since Chroma's class refuses a filter without ids.
            self._inner.delete_nodes(found, **delete_kwargs)
        self._forget(found)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete nodes asynchronously; see `delete_nodes`."""
        listed = node_ids is not None and filters is None
        found = node_ids if listed else await _alisted_ids(self._inner, node_ids, filters)
        if filters is None or found is None:
            await self._inner.adelete_nodes(node_ids, filters, **delete_kwargs)
        elif found:
            await self._inner.adelete_nodes(found, **delete_kwargs)
        await asyncio.to_thread(self._forget, found)

    def clear(self) -> None:
        """Delete all nodes of the inner store, and forget their KV."""
        found = listed_ids(self._inner)
        # Some stores, Chroma among them, cannot delete nothing.
        with suppress(*([Exception] if found == [] else [])):
            self._inner.clear()
        self._forget(found)

    async def aclear(self) -> None:
        """Clear the store asynchronously; see `clear`."""
        found = await _alisted_ids(self._inner)
        with suppress(*([Exception] if found == [] else [])):
            await self._inner.aclear()
        await asyncio.to_thread(self._forget, found)

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Get nodes from the inner store."""
        return self._inner.get_nodes(node_ids, filters)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Get nodes from the inner store."""
        return await self._inner.aget_nodes(node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the inner store; filters on metadata that does not divide documents log a warning."""
        self._watch(query)
        return self._inner.query(query, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the inner store asynchronously; see `query`."""
        self._watch(query)
        return await self._inner.aquery(query, **kwargs)

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Persist the inner store; the engine's store is durable by itself if it is a folder."""
        self._inner.persist(persist_path, fs)

    def flush(self) -> None:
        """Wait until the nodes that were added in the background are encoded.

        `StoreError` if the KV of some of them could not be stored; it is computed at query time.
        """
        self.engine.flush()

    def sync(self) -> int:
        """Forget the KV of nodes that were deleted behind this store's back, and return how many.

        What the engine knows and no vector store of this process has is forgotten, but for nodes above others (of a docstore) and
        parts of schemas. If chunks were added to the engine in another way, or other processes have vector stores over the same
        KV, call the engine's `sync` with all ids that are to stay instead.
        """
        above = set(ids_above(self.engine))
        return self._collection.sync(id for id in self.engine.ids() if id not in above)

    def left_of(self, nodes: Sequence[BaseNode]) -> list[str]:
        """Return what a killed process, or who deleted behind our back, has left of the documents of these nodes."""
        documents = {node.ref_doc_id for node in nodes if node.ref_doc_id}
        spared = {node.node_id for node in nodes}
        return self._collection.absent(
            id for name in documents for id in known_ids(self.engine, name) if id not in spared
        )

    def _encode(self, nodes: Sequence[BaseNode]) -> None:
        gone = self.left_of(nodes)
        try:
            self._encoder.encode(nodes, show_progress=self._show_progress, background=self._background, gone=gone)
        # A full disk, a server that is away, or a device without memory for a batch; torch has no class of its own for what
        # devices raise.
        except (BackendError, StoreError, MemoryError, RuntimeError) as error:
            logger.warning("the KV of %d nodes was not stored and is computed at query time: %s", len(nodes), error)

    def _present(self, node_ids: Sequence[str]) -> list[str] | None:
        return listed_ids(self._inner, node_ids)

    def _forget(self, node_ids: Sequence[str] | None) -> None:
        """Forget the KV of nodes that were deleted; None for nodes of which the store could not say which they are."""
        if node_ids is None:
            logger.warning(
                "%s cannot list what was deleted, so its KV stays stored; to free it, pass ids to delete_nodes",
                type(self._inner).__name__,
            )
        self.engine.delete(node_ids or [])

    def _forget_document(self, ref_doc_id: str, node_ids: Sequence[str]) -> None:
        """Forget the KV of a document that was deleted: of some nodes, and all others that the engine knows."""
        named = *known_ids(self.engine, ref_doc_id), *ids_above(self.engine, ref_doc_id)
        self._collection.sync([*node_ids, *named], deleted=True)

    def _watch(self, query: VectorStoreQuery) -> None:
        if query.filters is not None and self.engine.config.companions != "neutral":
            self._encoder.boundary.watch(query.filters)
