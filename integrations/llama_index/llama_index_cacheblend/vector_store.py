"""A vector store that has the KV of what it holds computed on the way in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.storage.docstore.types import BaseDocumentStore
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from cacheblend_rag.engine import Engine, EngineCollection
from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend.inventory import Inventory, Wanted
from llama_index_cacheblend.llm import BlendLLM, find_engine
from llama_index_cacheblend.nodes import Boundary, NodeEncoder, TextOf, parents_of

__all__ = ["BlendVectorStore"]

logger = logging.getLogger(__name__)


class BlendVectorStore(BasePydanticVectorStore):
    """A vector store whose nodes are also chunks of an engine, under their node ids.

    Adding encodes, deleting deletes KV, and the inner store does the rest. A node whose id already exists replaces the
    old one, text and KV, even in stores that would silently keep the old text. A node that has lost its KV, or that reached the
    inner store another way, is encoded when it is first retrieved, or by `warm_index`.

    A node is read behind another node of its document (``ref_doc_id``) and the end of what precedes it there; a node without a
    document, behind a neutral passage (`EngineConfig.companions`).

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
        shown in another form are taken for ones without a document.
    parents : BaseDocumentStore, optional
        Where `AutoMergingRetriever` finds the nodes that it merges others into. The parents of nodes that are added are then
        encoded with them, and forgotten with their document.
    boundary : sequence of str
        Metadata keys; nodes of one document with different values are treated as different documents. If filters on metadata
        tell readers apart, name their keys here.

    Raises
    ------
    ConfigError
        If `inner` is not a vector store of LlamaIndex or wraps one already, there is no engine, or an option cannot be used:
        `boundary` can't where the engine reads nodes behind any others (`companions` "similar").
    """

    stores_text: bool = True

    _inner: BasePydanticVectorStore = PrivateAttr()
    _encoder: NodeEncoder = PrivateAttr()
    _show_progress: bool = PrivateAttr()
    _background: bool = PrivateAttr()
    _parents: BaseDocumentStore | None = PrivateAttr()
    _inventory: Inventory = PrivateAttr()
    _collection: EngineCollection = PrivateAttr()

    def __init__(
        self,
        inner: BasePydanticVectorStore,
        *,
        engine: Engine | BlendLLM | None = None,
        server: str | None = None,
        show_progress: bool = False,
        background: bool = False,
        text_of: TextOf | None = None,
        parents: BaseDocumentStore | None = None,
        boundary: Sequence[str] = (),
    ) -> None:
        if not isinstance(inner, BasePydanticVectorStore):
            raise ConfigError(
                f"inner is a {type(inner).__name__}; give a LlamaIndex vector store, as ChromaVectorStore(chroma_collection=...)"
            )
        if isinstance(inner, BlendVectorStore):
            raise ConfigError(
                "inner is a BlendVectorStore already; use it as it is, or wrap what is in it: BlendVectorStore(store.inner, ...)"
            )
        if not isinstance(parents, BaseDocumentStore | None):
            raise ConfigError(f"parents is a {type(parents).__name__}; give a docstore, as storage_context.docstore")
        found = find_engine(engine, server)
        divided = Boundary(boundary)
        if found.config.companions == "similar" and boundary:
            raise ConfigError(
                'boundary says which nodes may know of each other, but with companions="similar" the engine reads every node '
                'behind any other; give it companions="own"'
            )
        alone = found.config.companions == "neutral"
        super().__init__(stores_text=inner.stores_text, is_embedding_query=inner.is_embedding_query)
        self._inner = inner
        self._show_progress = show_progress
        self._background = background
        self._parents = parents
        self._inventory = Inventory(inner)
        self._collection = found.collection(self._present)
        self._encoder = NodeEncoder(found, text_of, None if alone else divided)

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which LlamaIndex records this class."""
        return "BlendVectorStore"

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

    def with_parents(self, nodes: Sequence[BaseNode]) -> list[BaseNode]:
        """Return nodes, then those above them, where a docstore has these."""
        return [*nodes, *([] if self._parents is None else parents_of(nodes, self._parents))]

    def __getstate__(self) -> Any:
        # LlamaIndex's own would leave out what cannot be copied, the engine first of all, and say so only later.
        raise ConfigError(
            "a BlendVectorStore holds the model, which cannot be copied or sent to another process; create one there, and give "
            "IngestionPipeline(num_workers=...) only the transformations to run in parallel, as it does by itself"
        )

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Encode nodes, then add them to the inner store; those that are there already are replaced.

        A node is added even if its KV cannot be stored: a node beyond the model's window, or KV for which the disk has no room,
        is computed at query time, as far as that is possible. A warning gives the reason.

        Parameters
        ----------
        nodes : sequence of BaseNode
            Nodes with embeddings.
        **kwargs : Any
            Passed to the inner store.

        Returns
        -------
        list of str
            Their ids in the inner store.
        """
        nodes = list(nodes)
        node_ids = [node.node_id for node in nodes]
        self.sync_documents(nodes)
        encoded = self._encode(nodes)
        try:
            held = self._inventory.find(Wanted(node_ids=node_ids))
            # Where what is there cannot be listed, all are deleted first if that is possible. Whatever keeps the store from
            # deleting, that it has no collection yet for example, it says when it is added to.
            if held is None:
                with suppress(Exception):
                    self._inner.delete_nodes(node_ids=node_ids)
            elif held:
                self._inner.delete_nodes(node_ids=held)
            added = self._inner.add(nodes, **kwargs)
        except BaseException:
            self.engine.delete([node.node_id for node in encoded])
            raise
        self._inventory.note(encoded)
        self.sync_documents(nodes)
        return added

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes asynchronously; see `add`."""
        nodes = list(nodes)
        node_ids = [node.node_id for node in nodes]
        await asyncio.to_thread(self.sync_documents, nodes)
        encoded = await asyncio.to_thread(self._encode, nodes)
        try:
            held = await self._inventory.afind(Wanted(node_ids=node_ids))
            if held is None:
                with suppress(Exception):
                    await self._inner.adelete_nodes(node_ids=node_ids)
            elif held:
                await self._inner.adelete_nodes(node_ids=held)
            added = await self._inner.async_add(nodes, **kwargs)
        except BaseException:
            await asyncio.to_thread(self.engine.delete, [node.node_id for node in encoded])
            raise
        self._inventory.note(encoded)
        await asyncio.to_thread(self.sync_documents, nodes)
        return added

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete the nodes of a document, and forget their KV.

        The KV goes first: if the process dies in between, the nodes are still there to be deleted again.
        """
        found = self._inventory.find(Wanted(document=ref_doc_id))
        gone = self._forget(found, self._inventory.remembered(ref_doc_id), ref_doc_id)
        self._inner.delete(ref_doc_id, **delete_kwargs)
        self._forget_again(gone, ref_doc_id)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document asynchronously; see `delete`."""
        found = await self._inventory.afind(Wanted(document=ref_doc_id))
        gone = await asyncio.to_thread(self._forget, found, self._inventory.remembered(ref_doc_id), ref_doc_id)
        await self._inner.adelete(ref_doc_id, **delete_kwargs)
        await asyncio.to_thread(self._forget_again, gone, ref_doc_id)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete nodes by id, by filter, or those of the ids that pass the filter, and forget their KV.

        Without ids and filters the inner store says what is deleted; all KV is forgotten, since some take that for all nodes.
        """
        listed = node_ids is not None and filters is None
        found = node_ids if listed else self._inventory.find(Wanted(node_ids=node_ids, filters=filters))
        gone = self._forget(found)
        if filters is None or found is None:
            self._inner.delete_nodes(node_ids, filters, **delete_kwargs)
        elif found:
            # By name, since Chroma's class refuses a filter without ids.
            self._inner.delete_nodes(found, **delete_kwargs)
        self._forget_again(gone)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete nodes asynchronously; see `delete_nodes`."""
        listed = node_ids is not None and filters is None
        found = node_ids if listed else await self._inventory.afind(Wanted(node_ids=node_ids, filters=filters))
        gone = await asyncio.to_thread(self._forget, found)
        if filters is None or found is None:
            await self._inner.adelete_nodes(node_ids, filters, **delete_kwargs)
        elif found:
            await self._inner.adelete_nodes(found, **delete_kwargs)
        await asyncio.to_thread(self._forget_again, gone)

    def clear(self) -> None:
        """Delete all nodes of the inner store, and forget their KV."""
        found = self._inventory.find()
        gone = self._forget(found, self._inventory.remembered())
        # Some stores, Chroma among them, cannot delete nothing.
        with suppress(*([Exception] if found == [] else [])):
            self._inner.clear()
        self._forget_again(gone)

    async def aclear(self) -> None:
        """Clear the store asynchronously; see `clear`."""
        found = await self._inventory.afind()
        gone = await asyncio.to_thread(self._forget, found, self._inventory.remembered())
        with suppress(*([Exception] if found == [] else [])):
            await self._inner.aclear()
        await asyncio.to_thread(self._forget_again, gone)

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
        if query.filters is not None and (boundary := self._encoder.boundary) is not None:
            boundary.watch(query.filters)
        return self._inner.query(query, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the inner store asynchronously; see `query`."""
        if query.filters is not None and (boundary := self._encoder.boundary) is not None:
            boundary.watch(query.filters)
        return await self._inner.aquery(query, **kwargs)

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Persist the inner store; the engine's store is durable by itself if it is a folder."""
        self._inner.persist(persist_path, fs)

    def flush(self) -> None:
        """Wait until the nodes that were added in the background are encoded.

        Raises
        ------
        StoreError
            If the KV of some of them could not be stored; it is computed at query time.
        """
        self.engine.flush()

    def sync(self) -> int:
        """Forget the KV of nodes that were deleted behind this store's back.

        Where other processes have vector stores over the same KV, call the engine's `sync` with the ids of all of them instead.

        Returns
        -------
        int
            How many chunks were forgotten.
        """
        return self._collection.sync()

    def sync_documents(self, nodes: Sequence[BaseNode]) -> None:
        """Forget what a killed process, or who deleted behind our back, has left of the documents of these nodes."""
        documents = {node.ref_doc_id for node in nodes if node.ref_doc_id}
        self._collection.sync(documents, {node.node_id for node in nodes})

    def remember(self, nodes: Sequence[BaseNode]) -> None:
        """Note nodes that are encoded and stand elsewhere, in a docstore: `delete` of their document forgets their KV too."""
        self._inventory.note(nodes)

    def _encode(self, nodes: Sequence[BaseNode]) -> list[BaseNode]:
        """Encode nodes and those above them; return both."""
        encoded = self.with_parents(nodes)
        hidden = self._background or not self._show_progress
        with tqdm(desc="Encoding chunks", unit="chunk", disable=hidden) as bar:

            def show(finished: int, total: int) -> None:
                bar.total = total
                bar.update(finished - bar.n)

            self._encoder.encode(encoded, progress=None if hidden else show, background=self._background)
        return encoded

    def _present(self, node_ids: Sequence[str]) -> list[str] | None:
        return self._inventory.find(Wanted(node_ids=node_ids))

    def _forget(
        self, found: Sequence[str] | None, remembered: Sequence[str] = (), document: str | None = None
    ) -> list[str]:
        """Forget the KV of nodes that are about to be deleted, and of all else of a document; return their ids.

        What is remembered may have been deleted behind our back; then the store does not find it any more.
        """
        if found is None:
            logger.warning(
                "%s cannot list these nodes, so their KV stays stored; to free it, pass their ids to delete_nodes",
                type(self._inner).__name__,
            )
            found = ()
        gone = list(dict.fromkeys([*found, *remembered]))
        self._collection.forget(gone, [document] if document else [])
        return gone

    def _forget_again(self, node_ids: Sequence[str], document: str | None = None) -> None:
        """Forget nodes that are deleted now, since a query may have retrieved and encoded one while they were there."""
        self._collection.forget(node_ids, [document] if document else [])
        self._inventory.forget(node_ids)
