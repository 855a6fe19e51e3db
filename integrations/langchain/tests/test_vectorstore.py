"""`BlendVectorStore` over real Chroma and over InMemory: KV and documents agree."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chromadb
import faiss
import pytest
from langchain_chroma import Chroma
from langchain_community.docstore.in_memory import InMemoryDocstore
from langchain_community.vectorstores import FAISS
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.chunk import text_hash
from cacheblend_rag.engine import WarmEstimate
from cacheblend_rag.errors import ConfigError, PromptError, StoreFullError
from integrations.langchain.tests.conftest import CHUNKS
from langchain_cacheblend import BlendLLM, BlendVectorStore, estimate, warm
from langchain_cacheblend.inventory import Inventory

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


def agree(store: BlendVectorStore, texts: dict[str, str]) -> bool:
    """Whether the inner store has these texts, and the engine too, with their KV, and neither anything else."""
    store.flush()
    held = {document.id: document.page_content for document in Inventory(store.inner).documents()}
    records = [record for record in store.engine.records(store.engine.ids()) if record is not None]
    hashes = {record.id: record.text_hash for record in records}
    entries = store.engine.store.stats().entries
    return (held, hashes, entries) == (
        texts,
        {id: text_hash(text) for id, text in texts.items()},
        len({key for record in records for key in record.keys}),
    )


def replace(store: BlendVectorStore, texts: dict[str, str]) -> None:
    """Add texts under ids that are there already; FAISS alone has to delete them first."""
    if isinstance(store.inner, FAISS):
        store.delete([document.id for document in store.get_by_ids(list(texts)) if document.id])
    store.add_texts(texts.values(), ids=list(texts))


def test_documents_keep_their_ids_and_replace_others(store: BlendVectorStore, chunks: dict[str, str]) -> None:
    documents = [Document(text, id=id, metadata={"kind": id}) for id, text in chunks.items()]
    assert store.add_documents(documents) == list(chunks)
    found = store.similarity_search("goat", k=len(chunks))
    assert {document.id: document.page_content for document in found} == chunks
    report = store.engine.prefill(BlendPrompt("Read:\n", [str(each.id) for each in found], "\nWho?")).report
    assert (report.hits, report.misses) == (len(chunks), 0)
    changed = {"goat": "The goat has moved to the lighthouse.", "new": "Another text altogether."}
    replace(store, changed)
    assert agree(store, chunks | changed)
    store.delete(["goat", "mara"])
    assert agree(store, {id: text for id, text in (chunks | changed).items() if id not in ("goat", "mara")})
    # Without ids the store gives them.
    [id] = store.add_texts(["A text without an id."])
    assert store.engine.contains(id)


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
    # Texts of which some have no metadata.
    store.add_texts(chunks.values(), [None, {"source": "x"}], ids=list(chunks))  # type: ignore[list-item]
    assert set(engine.ids()) == {"foreign", *chunks}
    store.delete_collection()
    assert engine.ids() == ["foreign"]


def test_every_way_of_searching_is_the_inner_stores(store: BlendVectorStore, chunks: dict[str, str]) -> None:
    store.add_texts(chunks.values(), ids=list(chunks))
    vector = store.inner.embeddings.embed_query("goat")
    assert store.embeddings is store.inner.embeddings
    for name in ("similarity_search", "similarity_search_with_score", "max_marginal_relevance_search_by_vector"):
        argument: Any = vector if name.endswith("vector") else "goat"
        found = getattr(store, name)(argument, k=2)
        assert found == getattr(store.inner, name)(argument, k=2)
        assert found == asyncio.run(getattr(store, f"a{name}")(argument, k=2))
    for kind in ("similarity", "mmr"):
        retriever = store.as_retriever(search_type=kind, search_kwargs={"k": 2})
        assert len(retriever.invoke("goat")) == len(asyncio.run(retriever.ainvoke("goat"))) == 2
    assert store.search("goat", "similarity", k=2) == store.inner.search("goat", "similarity", k=2)


def test_texts_that_the_model_cannot_take_are_stored_without_kv(
    store: BlendVectorStore, chunks: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    store.add_texts(chunks.values(), ids=list(chunks))
    replace(store, {"goat": "   ", "second": "A second text, with letters."})
    assert set(store.engine.ids()) == {"mara", "works", "house", "second"}
    replace(store, {"house": "word " * 3000, "third": "Yet another text."})
    # The inner store has replaced its text, so the old one's KV is gone.
    assert set(store.engine.ids()) == {"mara", "works", "second", "third"}
    assert any("house" in record.getMessage() for record in caplog.records)
    store.engine.delete(["third"])
    warm(store)
    assert set(store.engine.ids()) == {"mara", "works", "second", "third"}
    if isinstance(store.inner, InMemoryVectorStore):
        store.add_texts(["Half a character: \ud83d."], ids=["mara"])
        assert set(store.engine.ids()) == {"works", "second", "third"}
        with pytest.raises(PromptError):
            BlendLLM(engine=store.engine).invoke("What \ud83d?")


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


class Numbering(InMemoryVectorStore):
    """Numbers its documents, as Milvus does, and gives them without ids, as langchain-qdrant's class does."""

    def add_texts(self, texts: Any, metadatas: Any = None, **kwargs: Any) -> list[Any]:
        given = [1000 + len(self.store) + number for number, _ in enumerate(texts)]
        super().add_texts(texts, metadatas, ids=list(map(str, given)))
        return given

    def delete(self, ids: Any = None, **kwargs: Any) -> None:
        super().delete(list(map(str, ids)))

    def get_by_ids(self, ids: Any, /) -> list[Document]:
        return [document.model_copy(update={"id": None}) for document in super().get_by_ids(ids)]


def test_stores_with_ways_of_their_own(embedding: Embeddings, engine: BlendEngine) -> None:
    store = BlendVectorStore(Numbering(embedding), engine=engine)
    sources = [{"source": "farm"} for _ in range(3)]
    assert store.add_texts(["The goat is grey.", "The kiln is red.", "The mill."], sources) == [1000, 1001, 1002]
    store.delete([1000])  # type: ignore[list-item]
    assert engine.ids() == ["1001", "1002"]
    assert warm(store, ids=["1001", "1002"]).encoded <= 2
    # Deleted behind our back, which is seen by asking, or by adding to the same source.
    store.inner.delete([1001])
    assert store.sync() == 1
    store.inner.delete([1002])
    [id] = store.add_texts(["The farm is sold."], sources[:1])
    assert engine.ids() == [str(id)]


@pytest.mark.parametrize("kind", [Chroma, InMemoryVectorStore, FAISS])
async def test_a_store_is_made_by_its_class_and_wrapped_in_one_line(
    kind: type[VectorStore], embedding: Embeddings, engine: BlendEngine, chunks: dict[str, str]
) -> None:
    documents = [Document(text, id=id, metadata={"kind": id}) for id, text in chunks.items()]
    options: dict[str, Any] = {"inner": kind, "engine": engine}
    if kind is Chroma:
        options |= {"client": chromadb.EphemeralClient(), "collection_name": f"test-{uuid.uuid4().hex}"}
    store = await BlendVectorStore.afrom_documents(documents, embedding, **options)
    assert isinstance(store.inner, kind) and store.embeddings is embedding
    assert agree(store, chunks)


# A store that is there already


def test_warming_encodes_what_a_store_has(store: BlendVectorStore, chunks: dict[str, str]) -> None:
    store.inner.add_texts(chunks.values(), [{"source": "one"} for _ in chunks], ids=list(chunks))
    seen: list[tuple[int, int]] = []
    assert store.engine.ids() == []
    assert warm(store, ids=["goat"]).encoded == 1
    result = warm(store, progress=lambda finished, total: seen.append((finished, total)))
    assert (result.encoded, result.unchanged) == (3, 1)
    assert seen[-1] == (4, 4)
    assert agree(store, chunks)
    assert warm(store).encoded == 0
    warm(store, lambda document: f"<{document.page_content}>")
    records = store.engine.records(list(chunks))
    assert [record and record.text_hash for record in records] == [text_hash(f"<{text}>") for text in chunks.values()]


def test_an_estimate_says_what_an_ingestion_takes(embedding: Embeddings, engine: BlendEngine) -> None:
    documents = [Document(" ".join([*CHUNKS.values()][:size]), metadata={"source": "a"}) for size in range(1, 5)]
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    # One that the model cannot take is left out, as it is when it is added.
    before = estimate(store, [*documents, Document("word " * 3000), Document(" ")])
    assert (before.chunks, engine.ids(), engine.store.stats().entries) == (len(documents), [], 0)
    store.add_documents(documents)
    assert estimate(store) == WarmEstimate(0, 0)
    engine.delete(engine.ids())
    assert (estimate(store).chunks, estimate(store).tokens) == (before.chunks, before.tokens)


# Prefetching


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_what_is_retrieved_comes_to_ram(
    embedding: Embeddings, tiny: Any, tokenizer: Any, chunks: dict[str, str], tmp_path: Path, asynchronous: bool
) -> None:
    settings = engine_settings(self_check=False)
    inner = InMemoryVectorStore(embedding)
    with BlendEngine(tiny, tokenizer, store=tmp_path, **settings) as engine:
        BlendVectorStore(inner, engine=engine).add_documents([Document(t, id=i) for i, t in chunks.items()])
    with BlendEngine(tiny, tokenizer, store=tmp_path, **settings) as engine:
        retriever = BlendVectorStore(inner, engine=engine).as_retriever(search_kwargs={"k": 3})
        documents = await retriever.ainvoke("goat") if asynchronous else retriever.invoke("goat")
        ids = [str(document.id) for document in documents]
        until = time.monotonic() + 60
        while engine.store.stats().ram_bytes == 0 and time.monotonic() < until:
            await asyncio.sleep(0.01)
        report = engine.prefill(BlendPrompt("Read:\n", [*ids, *(set(chunks) - set(ids))], "\nWho?")).report
        tiers = [chunk.tier for chunk in report.chunks]
        # The prompt may have been quicker than some reads.
        assert "ram" in tiers[:3] and tiers[3:] == ["disk"]


def test_wrong_objects_are_refused_before_anything_is_stored(embedding: Embeddings, engine: BlendEngine) -> None:
    inner = InMemoryVectorStore(embedding)
    llm: Any = BlendLLM(engine=engine)
    wrong: list[Callable[[], Any]] = [
        lambda: BlendVectorStore(inner, engine="reference"),  # type: ignore[arg-type]
        lambda: BlendVectorStore(BlendVectorStore(inner, engine=engine), engine=engine),
        lambda: BlendVectorStore.from_texts(["A text."], embedding, inner=inner, engine=engine),  # type: ignore[arg-type]
        lambda: BlendVectorStore.from_texts(["A text."], embedding, engine=engine),
        lambda: BlendLLM(engine=engine, server="http://127.0.0.1:1"),
        lambda: BlendLLM(engine=engine, store="kv"),
        lambda: warm(inner),  # type: ignore[arg-type]
        lambda: estimate(inner),  # type: ignore[arg-type]
        lambda: llm.invoke("Who?", documents=Document("A text.")),
        lambda: llm.invoke("Who?", documents=[{"text": "A text."}]),
    ]
    for make in wrong:
        with pytest.raises(ConfigError):
            make()
    assert not inner.store and BlendVectorStore(inner, engine=llm).engine is BlendLLM(engine=llm).engine is engine


def test_unknown_is_said(
    engine: BlendEngine, embedding: Embeddings, chunks: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    inner = InMemoryVectorStore(embedding)
    # As it is after a restart of an engine without a folder.
    inner.add_documents([Document(text, id=id) for id, text in chunks.items()])
    store = BlendVectorStore(inner, engine=engine)
    retriever = store.as_retriever()
    assert retriever.invoke("Where does she work?") and retriever.invoke("Where does she work?")
    assert sum("warm(store)" in each.getMessage() for each in caplog.records) == 1
    warm(store)
    caplog.clear()
    assert store.as_retriever().invoke("Where does she work?")
    assert "warm(store)" not in caplog.text


def test_a_bar_shows_how_far_adding_is(
    embedding: Embeddings, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cacheblend_rag.chat.engines._SHOWN_AFTER_S", 0.0)
    for shown in (False, True):
        store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine, show_progress=shown)
        store.add_texts(["A goat.", "A tower."])
        assert ("Encoding texts: 100%" in capsys.readouterr().err) is shown
