"""`BlendVectorStore` over real Chroma and over InMemory: KV and documents agree."""

import asyncio
import copy
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chromadb
import faiss
import pytest
from langchain_chroma import Chroma
from langchain_classic.retrievers import ParentDocumentRetriever
from langchain_community.docstore.in_memory import InMemoryDocstore
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_text_splitters import CharacterTextSplitter

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.chunk import text_hash
from cacheblend_rag.engine import WarmEstimate
from cacheblend_rag.errors import ConfigError, PromptError, StoreError, StoreFullError
from integrations.langchain.tests.conftest import CHUNKS
from langchain_cacheblend import BlendLLM, BlendRetriever, BlendVectorStore, estimate, warm
from langchain_cacheblend.inventory import Inventory
from langchain_cacheblend.search import SearchesInner

INNER: dict[str, Callable[[Embeddings], VectorStore]] = {
    "chroma": lambda embedding: Chroma(
        collection_name=f"test-{uuid.uuid4().hex}", embedding_function=embedding, client=chromadb.EphemeralClient()
    ),
    "in_memory": InMemoryVectorStore,
    "faiss": lambda given: FAISS(given, faiss.IndexFlatL2(len(given.embed_query(""))), InMemoryDocstore(), {}),
}


@pytest.fixture(params=INNER)
def store(request: pytest.FixtureRequest, embedding: Embeddings, engine: BlendEngine) -> Iterator[BlendVectorStore]:
    inner = INNER[request.param](embedding)
    yield BlendVectorStore(inner, engine=engine)
    if isinstance(inner, Chroma) and inner._chroma_collection is not None:
        inner.delete_collection()


def contents(store: BlendVectorStore, ids: list[str]) -> dict[str | None, str]:
    """The inner store's texts; langchain-chroma's own ``get_by_ids`` fails on documents without metadata."""
    if isinstance(store.inner, Chroma):
        found = store.inner.get(ids) if ids else {"ids": [], "documents": []}
        return dict(zip(found["ids"], found["documents"], strict=True))
    return {document.id: document.page_content for document in store.get_by_ids(ids)}


def agree(store: BlendVectorStore, texts: dict[str, str]) -> bool:
    held = contents(store, list(texts))
    records = store.engine.records(list(texts))
    hashes = {record.id: record.text_hash for record in records if record is not None}
    return held == texts and {*store.engine.ids()} == {*texts} and hashes == {i: text_hash(t) for i, t in texts.items()}


def test_texts_are_encoded_under_the_ids_that_the_store_gives(store: BlendVectorStore, chunks: dict[str, str]) -> None:
    ids = store.add_texts(chunks.values(), [{"place": number} for number in range(len(chunks))])
    assert agree(store, dict(zip(ids, chunks.values(), strict=True)))
    found = store.similarity_search("goat", k=len(chunks))
    assert {document.id for document in found} == set(ids)
    assert {document.page_content for document in found} == set(chunks.values())
    prompt = BlendPrompt("Read:\n", [document.id for document in found if document.id], "\nWho?")
    report = store.engine.prefill(prompt).report
    assert (report.hits, report.misses) == (len(chunks), 0)


def clear_for(store: BlendVectorStore, ids: list[str]) -> None:
    """Make room for other documents of the same ids; FAISS alone refuses to replace any."""
    if isinstance(store.inner, FAISS):
        store.delete(ids)


def test_documents_keep_their_ids_and_replace_others(store: BlendVectorStore, chunks: dict[str, str]) -> None:
    documents = [Document(text, id=id, metadata={"kind": id}) for id, text in chunks.items()]
    assert store.add_documents(documents) == list(chunks)
    assert agree(store, chunks)
    changed = chunks | {"goat": "The goat has moved to the lighthouse."}
    clear_for(store, ["goat"])
    store.add_documents([Document(changed["goat"], id="goat", metadata={"kind": "goat"})])
    assert agree(store, changed)
    clear_for(store, ["goat"])
    store.add_texts([chunks["goat"], "Another text altogether."], ids=["goat", "new"])
    assert agree(store, chunks | {"new": "Another text altogether."})


def test_deleting_by_criteria_forgets(embedding: Embeddings, engine: BlendEngine, chunks: dict[str, str]) -> None:
    store = BlendVectorStore(INNER["chroma"](embedding), engine=engine)
    engine.add([Chunk("A chunk of somebody else's store.", "foreign")])
    store.add_texts(chunks.values(), [{"animal": id == "goat"} for id in chunks], ids=list(chunks))
    store.delete(where={"animal": True})
    assert set(engine.ids()) == {"foreign", "mara", "works", "house"}
    store.delete(["mara", "works"], where={"animal": True})
    assert set(engine.ids()) == {"foreign", "mara", "works", "house"}
    store.reset_collection()
    assert engine.ids() == ["foreign"]
    store.add_texts(chunks.values(), ids=list(chunks))
    store.update_document("goat", Document("The goat is gone now.", metadata={"animal": True}))
    assert agree(store, chunks | {"goat": "The goat is gone now."}) is False  # the foreign chunk is there too
    engine.delete(["foreign"])
    assert agree(store, chunks | {"goat": "The goat is gone now."})
    store.delete_collection()
    assert engine.ids() == []


def test_every_way_of_searching_is_the_inner_stores(store: BlendVectorStore, chunks: dict[str, str]) -> None:
    store.add_texts(chunks.values(), ids=list(chunks))
    vector = store.inner.embeddings.embed_query("goat")
    assert store.embeddings is store.inner.embeddings
    for name, argument in [
        ("similarity_search", "goat"),
        ("similarity_search_with_score", "goat"),
        ("similarity_search_with_relevance_scores", "goat"),
        ("similarity_search_by_vector", vector),
        ("max_marginal_relevance_search", "goat"),
    ]:
        if name.endswith("relevance_scores") and isinstance(store.inner, InMemoryVectorStore):
            continue  # has none
        inner, later = getattr(store.inner, name), getattr(store, f"a{name}")
        found = getattr(store, name)(argument, k=2)
        assert found == inner(argument, k=2) == asyncio.run(later(argument, k=2))
    for kind in ("similarity", "mmr"):
        retriever = store.as_retriever(search_type=kind, search_kwargs={"k": 2})
        assert len(retriever.invoke("goat")) == len(asyncio.run(retriever.ainvoke("goat"))) == 2
    assert store.search("goat", "similarity", k=2) == store.inner.search("goat", "similarity", k=2)


def test_from_documents(embedding: Embeddings, engine: BlendEngine, chunks: dict[str, str]) -> None:
    documents = [Document(text, id=id) for id, text in chunks.items()]
    inner = InMemoryVectorStore(embedding)
    store = BlendVectorStore.from_documents(documents, embedding, inner=inner, engine=engine)
    assert agree(store, chunks)
    with pytest.raises(ConfigError, match="inner="):
        BlendVectorStore.from_texts(["a text"], embedding)
    with pytest.raises(ConfigError, match="embedding"):
        BlendVectorStore.from_texts(["a text"], DeterministicFakeEmbedding(size=26), inner=inner, engine=engine)


def test_unencodable_texts(store: BlendVectorStore, chunks: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    store.add_texts(chunks.values(), ids=list(chunks))
    clear_for(store, ["goat"])
    store.add_texts(["   ", "A second text, with letters."], ids=["goat", "second"])
    assert set(store.engine.ids()) == {"mara", "works", "house", "second"}
    clear_for(store, ["house"])
    added = store.add_texts(["word " * 3000, "Yet another text."], ids=["house", "third"])
    assert added == ["house", "third"]
    # The inner store has replaced its text, so the old one's KV is gone.
    assert set(store.engine.ids()) == {"mara", "works", "second", "third"}
    assert "house is stored without KV: chunk 'house' has" in caplog.text
    assert set(contents(store, added)) == {"house", "third"}
    store.engine.delete(["third"])
    warm(store)
    assert set(store.engine.ids()) == {"mara", "works", "second", "third"}


def test_half_a_character(embedding: Embeddings, engine: BlendEngine, caplog: pytest.LogCaptureFixture) -> None:
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    store.add_texts(["A text before.", "Another text."], ids=["a", "b"])
    store.add_texts(["A text \ud83d after.", "A third text."], ids=["a", "c"])
    assert set(engine.ids()) == {"b", "c"}
    assert "a is stored without KV" in caplog.text
    with pytest.raises(PromptError, match="at character 5, half of a UTF-16 pair"):
        BlendLLM(engine=engine).invoke("What \ud83d?")


@pytest.mark.parametrize("error", [StoreFullError("no room"), KeyboardInterrupt()])
def test_what_was_replaced_is_forgotten(error: BaseException, embedding: Embeddings, engine: BlendEngine) -> None:
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    store.add_texts(["A text before.", "Another text."], ids=["a", "b"])

    def interrupted(done: int, total: int) -> None:
        raise error

    with pytest.raises(type(error)):
        store.encode(["b", "a"], ["Another text, changed.", "A text " * 300], progress=interrupted)
    held = {record.id: record.text_hash for record in engine.records(["a", "b"]) if record is not None}
    assert held.items() <= {("b", text_hash("Another text, changed.")), ("a", text_hash("A text " * 300))}


def test_a_text_of_two_stores(store: BlendVectorStore, embedding: Embeddings, caplog: pytest.LogCaptureFixture) -> None:
    engine = store.engine
    other = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    for each in (store, other):
        each.add_documents([Document("The same text in both.", id="same")])
    store.add_documents([Document("A text of the first.", id="taken")])
    assert "vector store" not in caplog.text
    other.add_documents([Document("A text of the second.", id="taken"), Document("Its own text.", id="own")])
    assert "1 of 2 ids, taken for one, stand for another text in another vector store" in caplog.text
    store.delete(["same", "taken"])
    assert set(engine.ids()) == {"same", "taken", "own"}
    # The engine's chunk is the other's by now, whichever of the two was there first.
    assert [record.text_hash for record in engine.records(["taken"]) if record] == [text_hash("A text of the second.")]
    other.delete(["same", "taken"])
    assert engine.ids() == ["own"]


def test_a_deleted_text_is_forgotten_though_another_has_its_id(embedding: Embeddings, engine: BlendEngine) -> None:
    first, second = (BlendVectorStore(InMemoryVectorStore(embedding), engine=engine) for _ in range(2))
    first.add_documents([Document("A text of the first.", id="taken")])
    second.add_documents([Document("A text of the second.", id="taken")])
    second.delete(["taken"])
    assert engine.ids() == []


def test_two_objects_of_one_store(embedding: Embeddings, engine: BlendEngine, caplog: pytest.LogCaptureFixture) -> None:
    name, client = f"test-{uuid.uuid4().hex}", chromadb.EphemeralClient()
    first, second = (
        BlendVectorStore(Chroma(name, embedding_function=embedding, client=client), engine=engine) for _ in range(2)
    )
    first.add_documents([Document("A text.", id="a", metadata={"n": 1}), Document("Other.", id="b", metadata={"n": 2})])
    second.add_documents([Document("A text, changed.", id="a", metadata={"n": 1})])
    assert "another vector store" not in caplog.text
    second.delete(["a"])
    assert engine.ids() == ["b"]
    first.delete_collection()
    assert engine.ids() == []


def kept(store: BlendVectorStore) -> set[str]:
    """The texts of the documents whose KV is held; no other KV is there, and the inner store has no other documents.

    What was read behind a deleted text has only the KV of a prompt's first chunk, until it is asked for or warmed.
    """
    engine = store.engine
    engine.flush()
    for _ in range(2):
        records = [record for record in engine.records(engine.ids()) if record is not None]
        keys = list({key for record in records for key in record.keys})
        assert all(engine._store.holds(keys))
        assert engine._store.stats().entries == len(keys)
        warm(store)
        engine.flush()
    assert all(record.later is not None for record in records)
    documents = Inventory(store.inner).documents()
    assert {d.id: text_hash(d.page_content) for d in documents} == {r.id: r.text_hash for r in records}
    return {document.page_content for document in documents}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["index", "aindex"])
@pytest.mark.parametrize("cleanup", [None, "incremental", "full", "scoped_full"])
async def test_live_kv_stays(store: BlendVectorStore, chunks: dict[str, str], cleanup: Any, asynchronous: bool) -> None:
    records = InMemoryRecordManager("test")
    records.create_schema()

    async def run(sources: dict[str, list[str]]) -> set[str]:
        documents = [Document(t, metadata={"source": source}) for source, texts in sources.items() for t in texts]
        options = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256"}
        if asynchronous:
            await aindex(documents, records, store, **options)
        else:
            index(documents, records, store, **options)
        return kept(store)

    one, two = list(chunks.values())[:3], list(chunks.values())[3:]
    everything = {*one, *two}
    assert await run({"one": one, "two": two}) == everything
    assert await run({"one": one, "two": two}) == everything
    # The first document of one source is replaced; the other source is not seen.
    new = "A new text in its place."
    rest = {*one[1:], new}
    expected = {None: {*everything, new}, "incremental": {*rest, *two}, "scoped_full": {*rest, *two}, "full": rest}
    assert await run({"one": [*one[1:], new]}) == expected[cleanup]
    assert await run({}) == (set() if cleanup == "full" else expected[cleanup])


def test_flushing_encodes_what_was_added(embedding: Embeddings, engine: BlendEngine, chunks: dict[str, str]) -> None:
    inner = InMemoryVectorStore(embedding)
    store = BlendVectorStore.from_texts([*chunks.values()], ids=[*chunks], inner=inner, engine=engine, background=True)
    first, second, *rest = chunks
    store.delete([first])
    store.add_texts(["another text"], ids=[second])
    store.flush()
    assert agree(store, {second: "another text"} | {id: chunks[id] for id in rest})
    assert kept(store) == {"another text", *(chunks[id] for id in rest)}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", [Chroma, InMemoryVectorStore, FAISS])
async def test_a_store_is_made_by_its_class_and_wrapped_in_one_line(
    kind: type[VectorStore], embedding: Embeddings, engine: BlendEngine, chunks: dict[str, str], asynchronous: bool
) -> None:
    documents = [Document(text, id=id, metadata={"kind": id}) for id, text in chunks.items()]
    options: dict[str, Any] = {"inner": kind, "engine": engine}
    if kind is Chroma:
        options |= {"client": chromadb.EphemeralClient(), "collection_name": f"test-{uuid.uuid4().hex}"}
    if asynchronous:
        store = await BlendVectorStore.afrom_documents(documents, embedding, **options)
    else:
        store = BlendVectorStore.from_documents(documents, embedding, **options)
    assert isinstance(store.inner, kind)
    assert agree(store, chunks)
    assert store.embeddings is embedding
    engine.delete(engine.ids())
    if kind is not Chroma:
        nameless = BlendVectorStore.from_texts(list(chunks.values()), embedding, **options)
        assert kept(nameless) == set(chunks.values())


# A store that is there already


def test_warming_encodes_what_a_store_has(store: BlendVectorStore, chunks: dict[str, str]) -> None:
    store.inner.add_texts(chunks.values(), [{"source": "one"} for _ in chunks], ids=list(chunks))
    seen: list[tuple[int, int]] = []
    assert store.engine.ids() == []
    assert warm(store, ids=["goat"]).encoded == 1
    result = warm(store, progress=lambda finished, total: seen.append((finished, total)))
    assert (result.encoded, result.unchanged) == (3, 1)
    assert seen[-1] == (4, 4)
    assert kept(store) == set(chunks.values())
    assert warm(store).encoded == 0
    warm(store, lambda document: f"<{document.page_content}>")
    records = store.engine.records(list(chunks))
    assert [record and record.text_hash for record in records] == [text_hash(f"<{text}>") for text in chunks.values()]


def test_an_estimate_says_what_an_ingestion_takes(embedding: Embeddings, engine: BlendEngine) -> None:
    documents = [Document(" ".join([*CHUNKS.values()][:size]), metadata={"source": "a"}) for size in range(1, 5)]
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    # One that the model cannot take is left out, as it is when it is added.
    before = estimate(store, [*documents, Document("word " * 3000), Document(" ")])
    assert estimate(store, documents).tokens == before.tokens
    assert (engine.ids(), engine.store.stats().entries) == ([], 0)
    assert estimate(store).chunks == 0
    store.add_documents(documents)
    held = engine.store.stats()
    assert before.chunks == len(documents)
    assert before.ram_bytes == pytest.approx(held.ram_bytes, rel=0.01)
    assert estimate(store) == WarmEstimate(0, 0)
    engine.delete(engine.ids())
    assert estimate(store).ram_bytes == pytest.approx(held.ram_bytes, rel=0.01)
    with pytest.raises(ConfigError, match="estimate takes a BlendVectorStore, and this is a InMemoryVectorStore"):
        estimate(store.inner)  # type: ignore[arg-type]


class Nameless(InMemoryVectorStore):
    """Gives its documents without their ids, as langchain-qdrant's class does."""

    def get_by_ids(self, ids: Any, /) -> list[Document]:
        return [document.model_copy(update={"id": None}) for document in super().get_by_ids(ids)]


def test_documents_without_ids_keep_kv(embedding: Embeddings, engine: BlendEngine, chunks: dict[str, str]) -> None:
    inner = Nameless(embedding)
    store = BlendVectorStore(inner, engine=engine, name="nameless")
    documents = [Document(text, id=id, metadata={"source": "s"}) for id, text in chunks.items()]
    for document in documents:
        store.add_documents([document])
    assert set(engine.ids()) == set(chunks)
    # What came one by one is known to follow each other once it is read together.
    assert warm(store, ids=list(chunks)).encoded < len(chunks)
    assert warm(store, ids=list(chunks)).unchanged == len(chunks)
    inner.delete(["goat"])
    assert store.sync() == 1
    assert set(engine.ids()) == set(chunks) - {"goat"}


class Numbering(InMemoryVectorStore):
    """Numbers its documents, as Milvus does."""

    def add_texts(self, texts: Any, metadatas: Any = None, **kwargs: Any) -> list[Any]:
        given = [1000 + len(self.store) + number for number, _ in enumerate(texts)]
        super().add_texts(texts, metadatas, ids=list(map(str, given)))
        return given

    def delete(self, ids: Any = None, **kwargs: Any) -> None:
        super().delete(list(map(str, ids)))


def test_a_store_that_numbers_its_documents(embedding: Embeddings, engine: BlendEngine) -> None:
    store = BlendVectorStore(Numbering(embedding), engine=engine)
    assert store.add_texts(["The goat is grey.", "The kiln is red."]) == [1000, 1001]
    assert set(engine.ids()) == {"1000", "1001"}
    store.delete([1000])  # type: ignore[list-item]
    assert engine.ids() == ["1001"]


@pytest.mark.parametrize("metadatas", [[None, {"source": "x"}], [{"source": "x"}]])
def test_texts_of_which_some_have_no_metadata(embedding: Embeddings, engine: BlendEngine, metadatas: Any) -> None:
    inner = INNER["chroma"](embedding)
    store = BlendVectorStore(inner, engine=engine)
    ids = store.add_texts(["The goat is grey.", "The kiln is red."], metadatas)
    assert set(engine.ids()) == set(ids)


def test_an_index_that_fails(embedding: Embeddings, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    store.add_texts(["The goat is grey."])

    def fail(*args: Any) -> Any:
        raise StoreError("index is locked")

    monkeypatch.setattr(engine._store.names, "lookup", fail)
    assert [found.page_content for found in store.as_retriever().invoke("goat")] == ["The goat is grey."]


class Unlisted(SearchesInner):
    """A store of a kind that we do not know, which cannot list what it has."""

    def get_by_ids(self, ids: Any, /) -> list[Document]:
        return self.inner.get_by_ids(ids)

    @classmethod
    def from_texts(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_an_unlisted_store_is_given_its_ids(embedding: Embeddings, engine: BlendEngine, chunks: dict[str, str]) -> None:
    listed = InMemoryVectorStore(embedding)
    listed.add_documents([Document(text, id=id) for id, text in chunks.items()])
    store = BlendVectorStore(Unlisted(listed), engine=engine)
    with pytest.raises(ConfigError, match="ids="):
        warm(store)
    assert warm(store, ids=list(chunks)).encoded == 4


# Prefetching


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["as_retriever", "BlendRetriever"])
async def test_what_is_retrieved_comes_to_ram(
    embedding: Embeddings,
    tiny: Any,
    tokenizer: Any,
    chunks: dict[str, str],
    tmp_path: Path,
    asynchronous: bool,
    wrapped: bool,
) -> None:
    settings = engine_settings(self_check=False)
    inner = InMemoryVectorStore(embedding)
    with BlendEngine(tiny, tokenizer, store=tmp_path, **settings) as engine:
        BlendVectorStore(inner, engine=engine).add_documents([Document(t, id=i) for i, t in chunks.items()])
    with BlendEngine(tiny, tokenizer, store=tmp_path, **settings) as engine:
        store = BlendVectorStore(inner, engine=engine)
        options = {"search_kwargs": {"k": 3}}
        retriever: Any = store.as_retriever(**options)
        if wrapped:
            retriever = BlendRetriever(retriever=inner.as_retriever(**options), engine=engine)
        documents = await retriever.ainvoke("goat") if asynchronous else retriever.invoke("goat")
        ids = [document.id for document in documents]
        engine.prefetch(ids).wait(20)
        report = engine.prefill(BlendPrompt("Read:\n", [*ids, *(set(chunks) - set(ids))], "\nWho?")).report
        assert [chunk.tier for chunk in report.chunks] == ["ram"] * 3 + ["disk"]


def test_wrong_objects_are_refused_before_anything_is_stored(embedding: Embeddings, engine: BlendEngine) -> None:
    inner = InMemoryVectorStore(embedding)
    llm: Any = BlendLLM(engine=engine)
    for make in (
        lambda: BlendVectorStore(inner, engine=llm),
        lambda: BlendVectorStore.from_texts(["A text."], inner=inner, engine=llm),
        lambda: BlendVectorStore.from_texts(["A text."], embedding, inner=InMemoryVectorStore, engine=llm),
        lambda: BlendRetriever(retriever=inner.as_retriever(), engine=llm),
        lambda: BlendLLM(engine=llm),
    ):
        with pytest.raises(ConfigError, match=r"engine is a BlendLLM, not an engine; give its \.engine"):
            make()
    assert not inner.store
    with pytest.raises(ConfigError, match=r"llm\.engine"):
        BlendVectorStore(inner, engine="reference")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"already; use it as it is, or .*BlendVectorStore\(store.inner, ...\)"):
        BlendVectorStore(BlendVectorStore(inner, engine=engine), engine=engine)
    with pytest.raises(ConfigError, match="takes a BlendVectorStore, and this is a InMemoryVectorStore"):
        warm(inner)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"a single Document, 'A text\.'"):
        llm.invoke("Who?", documents=Document("A text."))


def test_what_only_the_inner_store_has_is_named(embedding: Embeddings, engine: BlendEngine) -> None:
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    with pytest.raises(AttributeError, match=r"in it has: store\.inner\.dump"):
        _ = store.dump
    with pytest.raises(AttributeError, match="'BlendVectorStore' object has no attribute 'nothing'"):
        _ = store.nothing
    assert not hasattr(store, "dump")
    assert copy.copy(store).inner is store.inner


def test_unknown_is_said(
    engine: BlendEngine, embedding: Embeddings, chunks: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    inner = InMemoryVectorStore(embedding)
    # As it is after a restart of an engine without a folder.
    inner.add_documents([Document(text, id=id) for id, text in chunks.items()])
    store = BlendVectorStore(inner, engine=engine)
    retriever = store.as_retriever()
    for _ in range(2):
        assert retriever.invoke("Where does she work?")
    [said] = [each.getMessage() for each in caplog.records if "is known to the engine" in each.getMessage()]
    assert "call warm(store)" in said
    warm(store)
    caplog.clear()
    assert store.as_retriever().invoke("Where does she work?")
    assert "is known to the engine" not in caplog.text


def pieces(source: str) -> list[Document]:
    return [Document(text, metadata={"source": source}) for text in CHUNKS.values()]


def wrapped(engine: BlendEngine, folder: Path, embedding: Embeddings) -> BlendVectorStore:
    client = chromadb.PersistentClient(str(folder / "chroma"))
    return BlendVectorStore(Chroma("nodes", embedding, client=client), engine=engine)


@pytest.mark.parametrize("has_id", [True, False], ids=["named", "nameless"])
def test_parents_of_prompts_go_with_their_source(engine: BlendEngine, embedding: Embeddings, has_id: bool) -> None:
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    splitter = CharacterTextSplitter(separator=".", chunk_size=30, chunk_overlap=0)
    retriever = ParentDocumentRetriever(vectorstore=store, docstore=InMemoryStore(), child_splitter=splitter)
    parents = [Document(" ".join(CHUNKS.values()), id="parent" if has_id else None, metadata={"source": "d"})]
    retriever.add_documents(parents)
    children = engine.ids()
    assert children
    llm = BlendLLM(engine=engine, max_tokens=2)
    llm.invoke("Where was Mara born?", documents=retriever.invoke("Mara"))
    engine.flush()
    before = engine.store.stats().ram_bytes
    store.delete(children[1:])
    assert ("parent" in engine.ids()) == has_id
    store.delete(children[:1])
    assert engine.ids() == []
    engine.delete(engine.heads())
    assert before > engine.store.stats().ram_bytes == 0


@pytest.mark.parametrize("when", ["asking", "adding"])
def test_deletions_elsewhere_seen(tiny: Any, tokenizer: Any, embedding: Embeddings, tmp_path: Path, when: str) -> None:
    with BlendEngine(tiny, tokenizer, store=tmp_path / "kv", **engine_settings(self_check=False)) as engine:
        store = wrapped(engine, tmp_path, embedding)
        ids = store.add_documents(pieces("d"))
        store.inner.delete(ids[:2])
        if when == "asking":
            assert store.sync() == 2
        else:
            ids += store.add_documents([Document("Another text of it.", metadata={"source": "d"})])
        assert set(engine.ids()) == set(ids[2:])


@pytest.mark.parametrize("shown", [False, True])
def test_a_bar_shows_how_far_it_is(
    engine: BlendEngine, embedding: Embeddings, capsys: pytest.CaptureFixture[str], shown: bool
) -> None:
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine, show_progress=shown)
    store.add_texts(["One goat.", "Another goat."])
    assert ("2/2" in capsys.readouterr().err) == shown
