"""The demonstration through LlamaIndex: a ``VectorStoreIndex`` over Chroma, answered by a ``BlendSynthesizer``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chromadb import Collection
from chromadb.api import ClientAPI
from llama_index.core import QueryBundle, VectorStoreIndex
from llama_index.core.schema import BaseNode, NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import FilterOperator, MetadataFilter, MetadataFilters
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.vector_stores.chroma import ChromaVectorStore

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.demo.corpus import DemoChunk
from cacheblend_rag.engine import BlendEngine
from llama_index_cacheblend import BlendLLM, BlendSynthesizer, BlendVectorStore

__all__ = ["LlamaIndexDemo"]


class LlamaIndexDemo:
    """One framework over one Chroma collection.

    Parameters
    ----------
    client : ClientAPI
        Chroma.
    collection : Collection
        Where its chunks are.
    engine : BlendEngine
        Encodes what is added.
    embedding : str
        Folder of the embedding model.
    max_new_tokens : int
        Most tokens of an answer.
    """

    title = "LlamaIndex"

    def __init__(
        self, client: ClientAPI, collection: Collection, engine: BlendEngine, embedding: str, max_new_tokens: int
    ) -> None:
        del client
        self._max_new_tokens = max_new_tokens
        self._store = BlendVectorStore(ChromaVectorStore(chroma_collection=collection), engine=engine)
        embed_model = HuggingFaceEmbedding(model_name=embedding, device="cpu", local_files_only=True)
        self._index = VectorStoreIndex.from_vector_store(self._store, embed_model=embed_model)

    def delete(self, ids: list[str]) -> None:
        self._store.delete_nodes(ids)

    def add(self, chunks: Sequence[DemoChunk]) -> None:
        self._index.insert_nodes(
            [
                TextNode(
                    id_=chunk.id,
                    text=chunk.text,
                    start_char_idx=chunk.start,
                    metadata=chunk.metadata,
                    # A chunk is found by its document's title too, but the model reads the text alone.
                    excluded_llm_metadata_keys=list(chunk.metadata),
                    excluded_embed_metadata_keys=["document", "number"],
                    relationships={
                        NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"document-{chunk.metadata['document']}")
                    },
                )
                for chunk in chunks
            ]
        )

    def retrieve(self, question: str, count: int) -> dict[str, BaseNode]:
        """Return so many chunks as the framework represents them, by their ids, best first."""
        found = self._index.as_retriever(similarity_top_k=count).retrieve(question)
        return {each.node.node_id: each.node for each in found}

    def whole(self, retrieved: dict[str, BaseNode]) -> dict[str, BaseNode]:
        """Return all chunks of the documents that some chunks are of, the document that was found first in front."""
        wanted = list(dict.fromkeys(node.metadata["document"] for node in retrieved.values()))
        among = MetadataFilter(key="document", operator=FilterOperator.IN, value=wanted)
        found = self._store.get_nodes(filters=MetadataFilters(filters=[among]))
        found.sort(key=lambda node: (wanted.index(node.metadata["document"]), node.metadata["number"]))
        return {node.node_id: node for node in found}

    def answer(
        self, engine: BlendEngine, question: str, nodes: Sequence[BaseNode], blend: BlendConfig
    ) -> tuple[str, dict[str, Any]]:
        """Return an engine's answer from chunks, and its report as the framework hands it on."""
        llm = BlendLLM(engine=engine, max_new_tokens=self._max_new_tokens)
        scored = [NodeWithScore(node=node) for node in nodes]
        response = BlendSynthesizer(llm=llm, blend_config=blend).synthesize(QueryBundle(question), scored)
        return str(response), (response.metadata or {})["blend"]
