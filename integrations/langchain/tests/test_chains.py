"""Whole chains, as the LangChain tutorials write them: retrieve, stuff, ask."""

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import chromadb
import pytest
from langchain_chroma import Chroma
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.errors import ConfigError, PromptError
from integrations.langchain.tests.asking import EXACT, KINDS, Kind, Reports, chunk_ids, own_answer
from langchain_cacheblend import BlendLLM, BlendVectorStore, ChatBlend, create_blend_documents_chain

TOKENS = 8
TEMPLATE = "Answer the question from the context only.\n\n{context}\n\nQuestion: {input}"
QUESTION = "Where does the goat live?"


@pytest.fixture
def store(engine: BlendEngine, embedding: Embeddings, chunks: dict[str, str]) -> Iterator[BlendVectorStore]:
    chroma = Chroma(collection_name=uuid.uuid4().hex, embedding_function=embedding, client=chromadb.EphemeralClient())
    store = BlendVectorStore(chroma, engine=engine)
    store.add_documents([Document(text, metadata={"name": name}) for name, text in chunks.items()])
    yield store
    chroma.delete_collection()


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


PROMPTS = {
    "chat": ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", TEMPLATE)]),
    "text": PromptTemplate.from_template(TEMPLATE),
}


@pytest.mark.parametrize("form", PROMPTS)
@KINDS
def test_at_ratio_one_the_answer_is_the_models_own(kind: Kind, form: str, store: BlendVectorStore) -> None:
    engine = store.engine
    prompt = PROMPTS[form]
    # Nothing is looked for here: what is blended, the chain has handed over.
    handing_over = kind(engine=engine, max_tokens=TOKENS, min_chunk_chars=100_000)
    looking = kind(engine=engine, max_tokens=TOKENS)
    inputs = {"context": store.similarity_search(QUESTION, k=3), "input": QUESTION}
    exact, unblended = {"blend_config": EXACT}, {"blend_config": engine.blend.replace(enabled=False)}
    for options in ({}, {"document_prompt": PromptTemplate.from_template("{name}:\n{page_content}\n")}):
        ours, reports = create_blend_documents_chain(handing_over, prompt, **options), Reports()
        assert isinstance(ours.invoke(inputs, {"callbacks": [reports]}), str)
        assert reports.hits == [3]

        # The very text of the stuffed chain, and the same tokens, since the tokenizer parts at line breaks.
        seen: list[Any] = []
        for chain_of in (create_blend_documents_chain, create_stuff_documents_chain):
            chain_of(RunnableLambda(seen.append) | (lambda _: "x"), prompt, **options).invoke(inputs)
        prompts = [handing_over.blend_prompt(seen[0]), looking.blend_prompt(seen[1])]
        assert chunk_ids(prompts[0]) == chunk_ids(prompts[1]) == [document.id for document in inputs["context"]]
        assert engine.prompt_ids(prompts[0]) == engine.prompt_ids(prompts[1])
        own = own_answer(engine, prompts[0], TOKENS)
        assert create_blend_documents_chain(handing_over.bind(**exact), prompt, **options).invoke(inputs) == own
        assert create_stuff_documents_chain(looking.bind(**exact), prompt, **options).invoke(inputs) == own
        assert create_stuff_documents_chain(looking.bind(**unblended), prompt, **options).invoke(inputs) == own


def test_a_prompt_without_a_place_for_documents_is_refused(engine: BlendEngine) -> None:
    with pytest.raises(ConfigError, match="document_variable_name"):
        create_blend_documents_chain(ChatBlend(engine=engine), ChatPromptTemplate.from_template("{input}"))
    upper = PromptTemplate.from_template("{{ context | replace('[[', '') }}", template_format="jinja2")
    with pytest.raises(PromptError):
        create_blend_documents_chain(BlendLLM(engine=engine), upper).invoke({"context": [Document("A text.")]})


@KINDS
def test_documents_beside_the_conversation(kind: Kind, store: BlendVectorStore) -> None:
    llm = kind(engine=store.engine, max_tokens=TOKENS, min_chunk_chars=100_000)
    documents = store.similarity_search(QUESTION, k=3)
    prompt = llm.blend_prompt(QUESTION, documents=documents)
    assert chunk_ids(prompt) == [document.id for document in documents]
    text = "\n\n".join([*(document.page_content for document in documents), QUESTION])
    assert store.engine.prompt_ids(prompt) == store.engine.prompt_ids(llm.blend_prompt(text))
    reports = Reports()
    answer = llm.invoke(QUESTION, {"callbacks": [reports]}, documents=documents, blend_config=EXACT)
    assert (answer if isinstance(answer, str) else answer.text) == own_answer(store.engine, prompt, TOKENS)
    assert reports.hits == [3]
    assert "".join(p if isinstance(p, str) else p.text for p in llm.stream(QUESTION, documents=documents))


def test_what_is_asked_is_text_though_it_is_stored_too(engine: BlendEngine, chunks: dict[str, str]) -> None:
    question = "Where does the goat live?"
    texts = [chunks["goat"], chunks["house"], question]
    engine.add(Chunk(text, f"n{number}") for number, text in enumerate(texts))
    llm = ChatBlend(engine=engine)
    context = f"Read this:\n\n{chunks['goat']}\n\n{chunks['house']}"
    assert chunk_ids(llm.blend_prompt([("system", context), ("human", question)])) == ["n0", "n1"]
    # What is behind other chunks, or before other words, is a passage like them.
    assert chunk_ids(llm.blend_prompt(f"{question}\n\nBy this:\n\n{context}")) == ["n2", "n0", "n1"]
    # As a client of the string model writes it.
    prompt = BlendLLM(engine=engine).blend_prompt(f"{context}\n\nQuestion: {question}")
    assert chunk_ids(prompt) == ["n0", "n1"] and prompt.segments[-1] == f"\n\nQuestion: {question}"
