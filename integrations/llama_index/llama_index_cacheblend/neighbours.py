"""Which nodes a node of no document is likely to be retrieved with."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from llama_index.core.schema import BaseNode, NodeRelationship, RelatedNodeInfo
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQuery

from cacheblend_rag.chunk import Chunk, text_hash
from cacheblend_rag.engine import BlendEngine
from llama_index_cacheblend.inventory import Inventory

__all__ = ["NeighbourFinder"]

logger = logging.getLogger(__name__)


class NeighbourFinder:
    """Finds the neighbours that an engine measures chunks behind: those in the document, else the nearest in the vector store.

    Parameters
    ----------
    store : BasePydanticVectorStore
        The store that finds nodes.
    engine : BlendEngine
        The engine, which says how many neighbours it measures behind; where that is none, nothing is looked for.
    inventory : Inventory
        Knows in which order nodes were added.
    """

    def __init__(self, store: BasePydanticVectorStore, engine: BlendEngine, inventory: Inventory) -> None:
        self._store = store
        self._engine = engine
        self._inventory = inventory
        self._can_ask = True

    def with_neighbours(self, chunks: Sequence[Chunk], nodes: Sequence[BaseNode]) -> list[Chunk]:
        """Return chunks with their neighbours.

        Nothing is embedded for it: the nearest nodes are found by the embedding that a node has. A chunk for which nothing is
        found is left to the engine, which takes the ones before it in the same call. A chunk of a document remembers what stands
        before it there, and needs none.

        Parameters
        ----------
        chunks : sequence of Chunk
            What is added.
        nodes : sequence of BaseNode
            The nodes that they stand for, and perhaps others.
        """
        count = self._engine.neighbours
        if not count:
            return list(chunks)
        by_id = {node.node_id: node for node in nodes}
        found = {str(chunk.id): _in_document(by_id[str(chunk.id)], count) for chunk in chunks if chunk.document is None}
        # What is stored already is not measured again.
        lonely = [chunk for chunk in chunks if found.get(str(chunk.id)) == []]
        records = self._engine.records([str(chunk.id) for chunk in lonely])
        new = [
            str(chunk.id)
            for chunk, record in zip(lonely, records, strict=True)
            if record is None or record.text_hash != text_hash(chunk.text)
        ]
        found |= {id: self._nearest(by_id[id], count) for id in new}
        return [replace(chunk, neighbours=found.get(str(chunk.id), ())) for chunk in chunks]

    def _nearest(self, node: BaseNode, count: int) -> list[str]:
        """Return the nodes nearest to one, in the order in which they were added as far as that is known."""
        if node.embedding is None or not self._can_ask:
            return []
        query = VectorStoreQuery(query_embedding=node.embedding, similarity_top_k=count + 1)
        try:
            result = self._store.query(query)
        except Exception as error:
            # Asking must not keep a user from adding, whatever a store raises.
            self._can_ask = False
            logger.warning(
                "%s could not be asked for the nodes nearest to a new one, which is measured behind the ones added before it: %s "
                "(this is said once)",
                type(self._store).__name__,
                error,
            )
            return []
        ids = result.ids or [each.node_id for each in result.nodes or []]
        nearest = [id for id in ids if id != node.node_id][:count]
        return self._inventory.in_order(nearest[::-1])


def _in_document(node: BaseNode, count: int) -> list[str]:
    """Return the nodes before and behind one in its document; where only one counts, the one before."""
    related = [node.relationships.get(where) for where in (NodeRelationship.PREVIOUS, NodeRelationship.NEXT)]
    return [each.node_id for each in related if isinstance(each, RelatedNodeInfo)][:count]
