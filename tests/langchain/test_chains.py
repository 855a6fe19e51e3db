"""Whole chains, as the LangChain tutorials write them: retrieve, stuff, ask."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator

import chromadb
import pytest
from langchain_chroma import Chroma
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnablePassthrough

from cacheblend_rag import BlendEngine
from langchain_cacheblend import BlendLLM, BlendVectorStore, ChatBlend
from tests.langchain.asking import Reports

TEMPLATE = "Answer the question from the context only.\n\n{context}\n\nQuestion: {input}"
QUESTION = "Where does the goat live?"


@pytest.fixture
def store(engine: BlendEngine, embedding: Embeddings, chunks: dict[str, str]) -> Iterator[BlendVectorStore]:
    chroma = Chroma(
        collection_name=f"test-{uuid.uuid4().hex}",
        embedding_function=embedding,
        client=chromadb.EphemeralClient(),
    )
    store = BlendVectorStore(chroma, engine=engine)
    store.add_documents([Document(text, metadata={"name": name}) for name, text in chunks.items()])
    yield store
    chroma.delete_collection()


@pytest.mark.parametrize("kind", [BlendLLM, ChatBlend])
def test_stuffed_documents_blend(kind: type[BlendLLM] | type[ChatBlend], store: BlendVectorStore) -> None:
    llm = kind(engine=store.engine, max_tokens=8)
    template = PromptTemplate if kind is BlendLLM else ChatPromptTemplate
    chain = create_stuff_documents_chain(llm, template.from_template(TEMPLATE))
    documents = store.similarity_search(QUESTION, k=3)
    reports = Reports()
    answer = chain.invoke({"context": documents, "input": QUESTION}, {"callbacks": [reports]})
    assert isinstance(answer, str)
    assert reports.hits == [3]
    # The same with the documents in another order, each with its own template around it.
    chain = create_stuff_documents_chain(
        llm,
        template.from_template(TEMPLATE),
        document_prompt=PromptTemplate.from_template("<doc name='{name}'>\n{page_content}\n</doc>"),
        document_separator="\n",
    )
    chain.invoke({"context": documents[::-1], "input": QUESTION}, {"callbacks": [reports]})
    assert reports.hits == [3, 3]


def test_a_retrieval_chain_blends_in_every_way_of_calling_it(store: BlendVectorStore) -> None:
    llm = ChatBlend(engine=store.engine, max_tokens=8)
    retriever = store.as_retriever(search_kwargs={"k": 4})
    combine = create_stuff_documents_chain(llm, ChatPromptTemplate.from_template(TEMPLATE))
    reports = Reports()
    config = {"callbacks": [reports]}
    chain = create_retrieval_chain(retriever, combine)
    answer = chain.invoke({"input": QUESTION}, config)
    assert [document.id for document in answer["context"]] == [d.id for d in store.similarity_search(QUESTION, k=4)]
    assert "".join(part.get("answer", "") for part in chain.stream({"input": QUESTION}, config)) == answer["answer"]

    lcel = (
        {
            "context": retriever | (lambda documents: "\n\n".join(d.page_content for d in documents)),
            "input": RunnablePassthrough(),
        }
        | ChatPromptTemplate.from_template(TEMPLATE)
        | llm
        | StrOutputParser()
    )
    assert lcel.invoke(QUESTION, config) == answer["answer"]
    assert asyncio.run(lcel.ainvoke(QUESTION, config)) == answer["answer"]
    assert lcel.batch([QUESTION] * 3, config) == [answer["answer"]] * 3
    assert reports.hits == [4] * 7


def test_a_deleted_document_is_no_longer_reused(store: BlendVectorStore) -> None:
    llm = ChatBlend(engine=store.engine, max_tokens=4)
    documents = store.similarity_search(QUESTION, k=4)
    chain = create_stuff_documents_chain(llm, ChatPromptTemplate.from_template(TEMPLATE))
    store.delete([documents[0].id])
    reports = Reports()
    chain.invoke({"context": documents, "input": QUESTION}, {"callbacks": [reports]})
    assert reports.hits == [3]
    assert store.engine.store.stats().entries == 3
