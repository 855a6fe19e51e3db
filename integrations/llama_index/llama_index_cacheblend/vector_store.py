"""A vector store that has the KV of what it holds computed on the way in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError, StoreError
from llama_index_cacheblend.inventory import Inventory
from llama_index_cacheblend.neighbours import NeighbourFinder
from llama_index_cacheblend.nodes import node_chunks

__all__ = ["BlendVectorStore"]

logger = logging.getLogger(__name__)


class BlendVectorStore(BasePydanticVectorStore):
    """A vector store whose nodes are also chunks of an engine, under their node ids.

    Adding encodes, deleting forgets, and all else is the inner store's. A node whose id is held already replaces the one that is
    there, text and KV, also in stores that would silently keep the old text. A node that the engine forgot, or that reached the
    inner store another way, is encoded when it is first retrieved.

    Parameters
    ----------
    inner : BasePydanticVectorStore
        The store that keeps and finds the nodes.
    engine : BlendEngine
        Where their KV is computed and kept, `BlendLLM.engine` for example.
    show_progress : bool
        Whether a bar shows the encoding.
    background : bool
        Whether nodes are added before they are encoded, which goes on behind the caller's back and without a bar; `flush`
        waits for it.

    Raises
    ------
    ConfigError
        If `inner` is not a vector store of LlamaIndex.
    """

    stores_text: bool = True

    _inner: BasePydanticVectorStore = PrivateAttr()
    _engine: BlendEngine = PrivateAttr()
    _show_progress: bool = PrivateAttr()
    _background: bool = PrivateAttr()
    _inventory: Inventory = PrivateAttr()
    _finder: NeighbourFinder = PrivateAttr()

    def __init__(
        self,
        inner: BasePydanticVectorStore,
        *,
        engine: BlendEngine,
        show_progress: bool = False,
        background: bool = False,
    ) -> None:
        if not isinstance(inner, BasePydanticVectorStore):
            raise ConfigError(
                f"inner is a {type(inner).__name__}; give a LlamaIndex vector store, as ChromaVectorStore(chroma_collection=...)"
            )
        super().__init__(stores_text=inner.stores_text, is_embedding_query=inner.is_embedding_query)
        self._inner = inner
        self._engine = engine
        self._show_progress = show_progress
        self._background = background
        self._inventory = Inventory(inner)
        self._finder = NeighbourFinder(inner, engine, self._inventory)

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
    def engine(self) -> BlendEngine:
        """Where the KV is computed and kept."""
        return self._engine

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Encode nodes, then add them to the inner store; those that are there already are replaced.

        KV that cannot be stored, on a full disk for example, keeps no node out: it is computed at query time.

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

        Raises
        ------
        PromptTooLongError
            If a node does not fit the model's window; then none was added.
        """
        nodes = list(nodes)
        node_ids = [node.node_id for node in nodes]
        self._encode(nodes)
        try:
            held = self._inventory.find(node_ids=node_ids)
            # Where nobody can say what is there, all are deleted first if that is possible.
            if held is None:
                with suppress(NotImplementedError):
                    self._inner.delete_nodes(node_ids=node_ids)
            elif held:
                self._inner.delete_nodes(node_ids=held)
            added = self._inner.add(nodes, **kwargs)
        except BaseException:
            self._engine.delete(node_ids)
            raise
        self._inventory.note(nodes)
        return added

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Do what `add` does."""
        nodes = list(nodes)
        node_ids = [node.node_id for node in nodes]
        await asyncio.to_thread(self._encode, nodes)
        try:
            held = await self._inventory.afind(node_ids=node_ids)
            if held is None:
                with suppress(NotImplementedError):
                    await self._inner.adelete_nodes(node_ids=node_ids)
            elif held:
                await self._inner.adelete_nodes(node_ids=held)
            added = await self._inner.async_add(nodes, **kwargs)
        except BaseException:
            self._engine.delete(node_ids)
            raise
        self._inventory.note(nodes)
        return added

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete the nodes of a document, and forget their KV.

        The KV goes first: if the process dies in between, the nodes are still there to be deleted again.
        """
        self._forget(self._inventory.find(document=ref_doc_id))
        self._inner.delete(ref_doc_id, **delete_kwargs)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Do what `delete` does."""
        await asyncio.to_thread(self._forget, await self._inventory.afind(document=ref_doc_id))
        await self._inner.adelete(ref_doc_id, **delete_kwargs)

    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete nodes by id, by filter, or those of the ids that pass the filter, and forget their KV."""
        found = node_ids if filters is None else self._inventory.find(node_ids=node_ids, filters=filters)
        self._forget(found)
        if filters is None or found is None:
            self._inner.delete_nodes(node_ids, filters, **delete_kwargs)
        elif found:
            # By name, since Chroma's class refuses a filter without ids.
            self._inner.delete_nodes(found, **delete_kwargs)

    async def adelete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Do what `delete_nodes` does."""
        found = node_ids if filters is None else await self._inventory.afind(node_ids=node_ids, filters=filters)
        await asyncio.to_thread(self._forget, found)
        if filters is None or found is None:
            await self._inner.adelete_nodes(node_ids, filters, **delete_kwargs)
        elif found:
            await self._inner.adelete_nodes(found, **delete_kwargs)

    def clear(self) -> None:
        """Delete all nodes of the inner store, and forget their KV."""
        found = self._inventory.find()
        self._forget(found)
        # Some stores, Chroma among them, cannot delete nothing.
        if found != []:
            self._inner.clear()

    async def aclear(self) -> None:
        """Do what `clear` does."""
        found = await self._inventory.afind()
        await asyncio.to_thread(self._forget, found)
        if found != []:
            await self._inner.aclear()

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Get nodes from the inner store."""
        return self._inner.get_nodes(node_ids, filters)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Get nodes from the inner store."""
        return await self._inner.aget_nodes(node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the inner store."""
        return self._inner.query(query, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the inner store."""
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
        self._engine.flush()

    def _encode(self, nodes: Sequence[BaseNode]) -> None:
        chunks = self._finder.with_neighbours(node_chunks(nodes), nodes)
        # An update may have left a node without text.
        self._engine.delete({node.node_id for node in nodes} - {chunk.id for chunk in chunks})
        hidden = self._background or not self._show_progress
        with tqdm(total=len(chunks), desc="Encoding chunks", unit="chunk", disable=hidden) as bar:
            try:
                if self._background:
                    self._engine.add(chunks, background=True)
                else:
                    self._engine.add(chunks, progress=lambda done, _: bar.update(done - bar.n))
            except StoreError as error:
                logger.warning(
                    "KV of some of %d nodes was not stored and is computed at query time: %s", len(nodes), error
                )

    def _forget(self, node_ids: Sequence[str] | None) -> None:
        if node_ids is None:
            logger.warning(
                "%s cannot say which nodes these are, so their KV stays stored; name them in delete_nodes to free it",
                type(self._inner).__name__,
            )
            return
        self._engine.delete(node_ids)
        self._inventory.forget(node_ids)
