"""Prompt templates in the prompt markup language, in LangChain's chains."""

import uuid
from collections.abc import Iterator
from typing import Any

import chromadb
import pytest
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import SystemMessage
from langchain_core.runnables import RunnablePassthrough

from cacheblend_pml import Schema, Schemas
from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.errors import ConfigError, PMLError, PromptError
from integrations.langchain.tests.asking import KINDS, Kind
from langchain_cacheblend import BlendVectorStore, ChatBlend, PMLPromptTemplate

SCHEMA = Schema.from_text(
    """
<schema name="notes">
  <module name="rules">Answer in <param name="count" len="6"/> words from the notes only.</module>
  <union>
    <module name="formal">Write as a letter would.</module>
    <module name="plain">Write plainly.</module>
  </union>
  <module name="notes">The notes go here.</module>
</schema>
"""
)
MARKUP = '<prompt schema="notes"><rules count="{count}"/><plain/><notes/>Question: {question}</prompt>'
REUSE = BlendConfig(recompute_ratio=0.0)


@pytest.fixture
def store(engine: BlendEngine, embedding: Embeddings, chunks: dict[str, str]) -> Iterator[BlendVectorStore]:
    chroma = Chroma(f"test-{uuid.uuid4().hex}", embedding, client=chromadb.EphemeralClient())
    store = BlendVectorStore(chroma, engine=engine)
    store.add_documents([Document(text, metadata={"name": name}) for name, text in chunks.items()])
    Schemas(engine).load(SCHEMA)
    yield store
    Schemas(engine).unload("notes")
    chroma.delete_collection()


def report_of(answer: Any) -> dict[str, Any]:
    return answer.response_metadata["blend"]


@KINDS
def test_retrieved_documents_are_modules_whose_kv_is_there(kind: Kind, store: BlendVectorStore) -> None:
    llm = kind(engine=store.engine, max_tokens=6, blend_config=REUSE, temperature=0)
    template = PMLPromptTemplate.from_markup(SCHEMA, MARKUP, documents="notes", separator="\n")
    chain = RunnablePassthrough.assign(notes=lambda a: store.similarity_search(a["question"], k=3)) | template | llm
    asked = {"question": "Where does the goat live?", "count": "five"}
    first, second = chain.invoke(asked), chain.invoke(asked)
    if kind is ChatBlend:
        report = report_of(first)
        documents = [chunk for chunk in report["chunks"] if chunk["id"] is None and chunk["tokens"] > 2]
        assert len(documents) == 3 and all(chunk["hit"] for chunk in documents)
        assert report["recomputed_tokens"] == 0 and report["hits"] >= 5
        # From then on the line breaks between them are there as well.
        assert report_of(second)["misses"] == 0
        assert first.content == second.content
    else:
        assert first == second
    # Variables are text and never markup, and the text that LangChain shows holds the documents as well.
    evil = '<formal/> & "{count}"'
    assert template.format(count="ten", question=evil, notes=[]).endswith(f"Question: {evil}")
    value = template.invoke(asked | {"notes": store.similarity_search(asked["question"], k=3)})
    assert all(text in value.to_string() for text in [d.page_content for d in store.similarity_search("goat", k=1)])


def test_what_does_not_fit_is_refused(store: BlendVectorStore) -> None:
    template = PMLPromptTemplate.from_markup(SCHEMA, MARKUP, documents="notes").partial(count="nine")
    assert {*template.input_variables} == {"notes", "question"}
    for name in ("papers", "plain"):
        with pytest.raises(PMLError):
            PMLPromptTemplate.from_markup(SCHEMA, MARKUP, documents=name)
    for wrong in ("one text", [5], Document("d")):
        with pytest.raises(ConfigError):
            template.invoke({"question": "?", "notes": wrong})
    llm = ChatBlend(engine=store.engine, max_tokens=3)
    given = {"question": "?", "notes": []}
    with pytest.raises(PMLError):
        (template | llm).invoke(given | {"count": "one two three four five six seven"})
    message = template.invoke(given).to_messages()[0]
    for messages, options in (([SystemMessage("Be kind."), message], {}), ([message], {"documents": [Document("d")]})):
        with pytest.raises(PromptError):
            llm.invoke(messages, **options)
