"""Prompt templates in the prompt markup language, in LangChain's chains."""

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import chromadb
import pytest
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnablePassthrough

from cacheblend_pml import Import, Schema, Schemas
from cacheblend_rag import BlendConfig, BlendEngine, Chunk
from cacheblend_rag.errors import ConfigError, PMLError, PromptError
from integrations.langchain.tests.asking import KINDS, Kind
from langchain_cacheblend import BlendLLM, BlendVectorStore, ChatBlend, PMLPromptTemplate

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
REUSE = BlendConfig(selector="none", recompute_ratio=0.0)


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


def test_variables_are_text_and_never_markup() -> None:
    template = PMLPromptTemplate.from_markup(SCHEMA, MARKUP)
    assert template.input_variables == ["count", "question"]
    evil = '<formal/> & "{count}"'
    prompt = template.pml_prompt(count="ten", question=evil)
    assert list(prompt.imports) == ["rules", "plain", "notes"]
    assert prompt.imports["rules"].arguments == {"count": "ten"}
    text = template.format(count="ten", question=evil)
    assert text.endswith(f"Question: {evil}") and "Answer in ten words" in text and "letter" not in text


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
    # The text that LangChain shows holds the documents as well.
    value = template.invoke(asked | {"notes": store.similarity_search(asked["question"], k=3)})
    assert all(text in value.to_string() for text in [d.page_content for d in store.similarity_search("goat", k=1)])


def test_stream_and_async_answer_as_invoke_does(store: BlendVectorStore, chunks: dict[str, str]) -> None:
    asked = {"question": "Who?", "count": "two", "notes": list(chunks.values())[:2]}
    for kind in (ChatBlend, BlendLLM):
        llm = kind(engine=store.engine, max_tokens=6, blend_config=REUSE, temperature=0)
        chain = PMLPromptTemplate.from_markup(SCHEMA, MARKUP, documents="notes") | llm
        whole = chain.invoke(asked)
        text = whole if isinstance(whole, str) else whole.content
        pieces = [each if isinstance(each, str) else each.content for each in chain.stream(asked)]
        assert "".join(pieces) == text

        async def both(chain: Any = chain) -> tuple[Any, list[Any]]:
            return await chain.ainvoke(asked), [each async for each in chain.astream(asked)]

        later, streamed = asyncio.run(both())
        assert (later if isinstance(later, str) else later.content) == text
        assert "".join(each if isinstance(each, str) else each.content for each in streamed) == text


def test_parts_are_no_chunks(store: BlendVectorStore, chunks: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    prompt = ChatBlend(engine=store.engine).blend_prompt(f"Write plainly.\n{next(iter(chunks.values()))}\nWho?")
    assert sum(isinstance(segment, Chunk) for segment in prompt.segments) == 1
    assert "cannot be restored" not in caplog.text


def test_a_partial_template_and_one_made_of_imports(store: BlendVectorStore) -> None:
    template = PMLPromptTemplate(SCHEMA.prompt(Import("rules", {"count": "{count}"}), Import("formal"), "{question}"))
    half = template.partial(count="nine")
    assert half.input_variables == ["question"]
    chain = half | ChatBlend(engine=store.engine, max_tokens=3, blend_config=REUSE)
    report = report_of(chain.invoke({"question": "Why?"}))
    assert [chunk["id"] for chunk in report["chunks"]] == ["pml/notes/rules", "pml/notes/formal"]


def test_what_does_not_fit_is_refused(store: BlendVectorStore) -> None:
    with pytest.raises(PMLError, match="does not import; it imports"):
        PMLPromptTemplate.from_markup(SCHEMA, MARKUP, documents="papers")
    template = PMLPromptTemplate.from_markup(SCHEMA, MARKUP, documents="notes")
    for wrong in ("one text", [5], Document("d")):
        with pytest.raises(ConfigError, match="documents"):
            template.invoke({"count": "1", "question": "?", "notes": wrong})
    llm = ChatBlend(engine=store.engine, max_tokens=3)
    with pytest.raises(PMLError, match="more than the 6"):
        (template | llm).invoke({"count": "one two three four five six seven", "question": "?", "notes": []})
    message = template.invoke({"count": "1", "question": "?", "notes": []}).to_messages()[0]
    assert isinstance(message, HumanMessage)
    with pytest.raises(PromptError, match="whole conversation"):
        llm.invoke([SystemMessage("Be kind."), message])
    with pytest.raises(PromptError, match="the call has documents"):
        llm.invoke([message], documents=[Document("d")])
    with pytest.raises(PMLError, match="union"):
        PMLPromptTemplate.from_markup(SCHEMA, MARKUP, documents="plain")
