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
    """One framework over one Chroma collection."""

    def __init__(
        self, client: ClientAPI, collection: Collection, engine: BlendEngine, embedding: str, max_new_tokens: int
    ) -> None:
        del client
        self._llm = BlendLLM(engine=engine, max_new_tokens=max_new_tokens)
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

    def search(self, question: str, count: int) -> list[int]:
        """Return the document of each of so many chunks that are found, best first."""
        found = self._index.as_retriever(similarity_top_k=count).retrieve(question)
        return [each.node.metadata["document"] for each in found]

    def read(self, documents: list[int]) -> list[BaseNode]:
        """Return all chunks of some documents in reading order, as the framework represents them."""
        wanted = MetadataFilter(key="document", operator=FilterOperator.IN, value=list(documents))
        found = self._store.get_nodes(filters=MetadataFilters(filters=[wanted]))
        return sorted(found, key=lambda node: (node.metadata["document"], node.metadata["number"]))

    def answer(self, question: str, retrieved: Sequence[Any], blend: BlendConfig) -> tuple[str, dict[str, Any]]:
        """Return the answer from chunks, and the engine's report as the framework hands it on."""
        nodes = [NodeWithScore(node=node) for node in retrieved]
        response = BlendSynthesizer(llm=self._llm, blend_config=blend).synthesize(QueryBundle(question), nodes)
        return str(response), (response.metadata or {})["blend"]
