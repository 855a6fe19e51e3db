"""LangChain over a server's engine: the same classes, the model elsewhere, the same answers."""

import asyncio
from collections.abc import Iterator

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.load import dumpd, load
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from cacheblend_rag import BlendEngine
from integrations.langchain.tests.test_running import LOAD_IS_BETA, trusting
from integrations.serve.tests.conftest import serving
from langchain_cacheblend import BlendLLM, BlendVectorStore, ChatBlend
from tests.engines import documents_of

PROMPT = ChatPromptTemplate.from_template("Answer from the context only.\n\n{context}\n\nQuestion: {question}")
QUESTION = "Where does she work?"


@pytest.fixture
def address(engine: BlendEngine) -> Iterator[str]:
    with serving(engine) as address:
        yield address


@pytest.fixture
def store(address: str, embedding: Embeddings, chunks: dict[str, str]) -> BlendVectorStore:
    store = BlendVectorStore(InMemoryVectorStore(embedding), server=address)
    store.add_documents([Document(text, id=id, metadata={"source": "mara.txt"}) for id, text in chunks.items()])
    return store


def chain(llm: ChatBlend, store: BlendVectorStore) -> Runnable[str, str]:
    def joined(documents: list[Document]) -> str:
        return "\n\n".join(document.page_content for document in documents)

    given = {"context": store.as_retriever() | joined, "question": RunnablePassthrough()}
    return given | PROMPT | llm | StrOutputParser()


def test_a_chain_answers_as_over_the_engine_itself(engine: BlendEngine, address: str, store: BlendVectorStore) -> None:
    here, there = ChatBlend(engine=engine, max_tokens=12), ChatBlend(server=address, max_tokens=12)
    expected = chain(here, store).invoke(QUESTION)
    assert chain(there, store).invoke(QUESTION) == expected
    assert "".join(chain(there, store).stream(QUESTION)) == expected
    assert asyncio.run(chain(there, store).ainvoke(QUESTION)) == expected
    questions = [QUESTION, "What lives there?"]
    assert chain(there, store).batch(questions) == chain(here, store).batch(questions)
    message = there.invoke(PROMPT.invoke({"context": store.get_by_ids(["works"])[0].page_content, "question": "?"}))
    assert message.response_metadata["blend"]["hits"] == 1
    assert message.usage_metadata["output_tokens"] == 12
    here, there = BlendLLM(engine=engine, max_tokens=8), BlendLLM(server=address, max_tokens=8)
    assert there.generate(questions).generations[0][0].text == here.generate(questions).generations[0][0].text
    assert there.invoke(QUESTION, stop=["zzz"]) == here.invoke(QUESTION, stop=["zzz"])


def test_what_is_deleted_is_forgotten_there(engine: BlendEngine, store: BlendVectorStore) -> None:
    assert engine.document(documents_of(engine, ["works"])[0] or "") == ["mara", "works", "house", "goat"]
    store.delete(["goat"])
    assert engine.ids() == ["mara", "works", "house"]


@LOAD_IS_BETA
def test_a_model_of_a_server_can_be_written_down(address: str) -> None:
    llm = ChatBlend(server=address, max_tokens=6)
    again = load(dumpd(llm), **trusting(ChatBlend))
    assert again.invoke(QUESTION).content == llm.invoke(QUESTION).content
