"""The demonstration through LlamaIndex."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chromadb import Collection
from llama_index.core import QueryBundle, VectorStoreIndex
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores.types import FilterOperator, MetadataFilter, MetadataFilters
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.vector_stores.chroma import ChromaVectorStore

from cacheblend_rag.demo.corpus import best_documents, demo_chunks
from cacheblend_rag.demo.framework import DemoEngine, FrameworkAnswer
from llama_index_cacheblend import BlendLLM, BlendSynthesizer, BlendVectorStore, install, uninstall

if TYPE_CHECKING:
    from cacheblend_rag.config import BlendConfig

__all__ = ["LlamaIndexDemo"]


class _WholeDocuments(BaseNodePostprocessor):
    """Widens the chunks that were found to their documents, in reading order."""

    _store: BlendVectorStore = PrivateAttr()
    _sizes: list[int] = PrivateAttr()
    _enough: int = PrivateAttr()

    def __init__(self, store: BlendVectorStore, sizes: list[int], enough: int) -> None:
        super().__init__()
        self._enough = enough
        self._store = store
        self._sizes = sizes

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        chosen = best_documents((node.metadata["document"] for node in nodes), self._sizes, self._enough)
        wanted = MetadataFilter(key="document", operator=FilterOperator.IN, value=list(chosen))
        found = self._store.get_nodes(filters=MetadataFilters(filters=[wanted]))
        found.sort(key=lambda node: (node.metadata["document"], node.metadata["number"]))
        return [NodeWithScore(node=node) for node in found]


class LlamaIndexDemo:
    """A `VectorStoreIndex` over Chroma, asked with ``response_mode="blend"``.

    Parameters
    ----------
    collection : Collection
        The Chroma collection.
    engine : DemoEngine
        The engine.
    embedding : str
        The embedding model's folder.
    context_chunks : int
        How many chunks to answer from.
    max_new_tokens : int
        Most tokens of an answer.
    """

    name = "llama_index"

    def __init__(
        self, collection: Collection, engine: DemoEngine, embedding: str, context_chunks: int, max_new_tokens: int
    ) -> None:
        self._collection = collection
        self._engine = engine
        self._chunks = demo_chunks(self.name)
        self._llm = BlendLLM(engine=engine, max_new_tokens=max_new_tokens)
        self._store = BlendVectorStore(ChromaVectorStore(chroma_collection=collection), engine=engine)
        embed_model = HuggingFaceEmbedding(model_name=embedding, device="cpu", local_files_only=True)
        self._index = VectorStoreIndex.from_vector_store(self._store, embed_model=embed_model)
        sizes = [0] * (1 + max(chunk.document for chunk in self._chunks))
        for chunk in self._chunks:
            sizes[chunk.document] += 1
        install()
        try:
            self._asked = self._index.as_query_engine(
                llm=self._llm,
                response_mode="blend",
                similarity_top_k=context_chunks,
                node_postprocessors=[_WholeDocuments(self._store, sizes, context_chunks)],
            )
        finally:
            uninstall()
        assert isinstance(self._asked, RetrieverQueryEngine)

    def ingest(self) -> int:
        """Bring the collection and the KV up to date."""
        present = set(self._collection.get(include=[])["ids"])
        stale = sorted(present - {chunk.id for chunk in self._chunks})
        if stale:
            self._store.delete_nodes(stale)
        missing = [chunk for chunk in self._chunks if chunk.id not in present or not self._engine.contains(chunk.id)]
        self._index.insert_nodes(
            [
                TextNode(
                    id_=chunk.id,
                    text=chunk.text,
                    start_char_idx=chunk.start,
                    metadata={"document": chunk.document, "title": chunk.title, "number": chunk.number},
                    # A chunk is found by its document's title too, but the model reads the text alone.
                    excluded_llm_metadata_keys=["document", "title", "number"],
                    excluded_embed_metadata_keys=["document", "number"],
                    relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"document-{chunk.document}")},
                )
                for chunk in missing
            ]
        )
        return len(self._chunks)

    def retrieve(self, question: str) -> list[NodeWithScore]:
        """Return the nodes of the best documents."""
        return self._asked.retrieve(QueryBundle(question))

    def chunk_ids(self, retrieved: Any) -> list[str]:
        """Return the nodes' ids."""
        return [node.node_id for node in retrieved]

    def answer(self, question: str, retrieved: Any, config: BlendConfig) -> FrameworkAnswer:
        """Answer from nodes."""
        if config == self._engine.config:
            response = self._asked.synthesize(QueryBundle(question), retrieved)
        else:
            response = BlendSynthesizer(llm=self._llm, config=config).synthesize(QueryBundle(question), retrieved)
        return FrameworkAnswer(str(response), (response.metadata or {})["blend"])
