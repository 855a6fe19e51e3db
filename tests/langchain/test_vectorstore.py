"""`BlendVectorStore` over real Chroma and over InMemory: KV and documents agree."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import chromadb
import pytest
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.chunk import text_hash
from cacheblend_rag.errors import CacheBlendError, ConfigError, PromptTooLongError
from langchain_cacheblend import BlendVectorStore

INNER: dict[str, Callable[[Embeddings], VectorStore]] = {
    "chroma": lambda embedding: Chroma(
        collection_name=f"test-{uuid.uuid4().hex}",
        embedding_function=embedding,
        client=chromadb.EphemeralClient(),
    ),
    "in_memory": InMemoryVectorStore,
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
    """Whether the inner store and the engine hold exactly these texts."""
    held = contents(store, list(texts))
    records = store.engine.records(list(texts))
    hashes = {record.id: record.text_hash for record in records if record is not None}
    return (
        held == texts
        and set(store.engine.ids()) == set(texts)
        and hashes == {id: text_hash(t) for id, t in texts.items()}
    )


def test_texts_are_encoded_under_the_ids_that_the_store_gives(store: BlendVectorStore, chunks: dict[str, str]) -> None:
    ids = store.add_texts(chunks.values(), [{"place": number} for number in range(len(chunks))])
    assert agree(store, dict(zip(ids, chunks.values(), strict=True)))
    found = store.similarity_search("goat", k=len(chunks))
    assert {document.id for document in found} == set(ids)
    assert {document.page_content for document in found} == set(chunks.values())
    prompt = BlendPrompt("Read:\n", [document.id for document in found if document.id], "\nWho?")
    report = store.engine.prefill(prompt).report
    assert (report.hits, report.misses) == (len(chunks), 0)


def test_documents_keep_their_ids_and_replace_those_of_the_same_id(
    store: BlendVectorStore, chunks: dict[str, str]
) -> None:
    documents = [Document(text, id=id, metadata={"kind": id}) for id, text in chunks.items()]
    assert store.add_documents(documents) == list(chunks)
    assert agree(store, chunks)
    changed = chunks | {"goat": "The goat has moved to the lighthouse."}
    store.add_documents([Document(changed["goat"], id="goat", metadata={"kind": "goat"})])
    assert agree(store, changed)
    store.add_texts([chunks["goat"], "Another text altogether."], ids=["goat", "new"])
    assert agree(store, chunks | {"new": "Another text altogether."})


def test_deleting_forgets(store: BlendVectorStore, chunks: dict[str, str]) -> None:
    store.add_texts(chunks.values(), ids=list(chunks))
    store.engine.add([Chunk("A chunk of somebody else's store.", "foreign")])
    store.delete(["goat", "house"])
    store.engine.delete(["foreign"])
    assert agree(store, {id: chunks[id] for id in ("mara", "works")})
    assert store.engine.store.stats().entries == 2


def test_deleting_by_criteria_forgets_what_is_gone(
    embedding: Embeddings, engine: BlendEngine, chunks: dict[str, str]
) -> None:
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


def test_a_store_without_a_method_says_so(embedding: Embeddings, engine: BlendEngine) -> None:
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    with pytest.raises(ConfigError, match="InMemoryVectorStore has no reset_collection"):
        store.reset_collection()


def test_async_forms(store: BlendVectorStore, chunks: dict[str, str]) -> None:
    async def everything() -> None:
        half = dict(list(chunks.items())[:2])
        await store.aadd_texts(half.values(), ids=list(half))
        await store.aadd_documents([Document(text, id=id) for id, text in list(chunks.items())[2:]])
        assert agree(store, chunks)
        await store.aadd_texts(["A text with a note."], [{"note": 1}], ids=["noted"])
        assert len(await store.asimilarity_search("goat", k=3)) == 3
        assert len(await store.asimilarity_search_with_score("goat", k=2)) == 2
        assert [document.id for document in await store.aget_by_ids(["noted"])] == ["noted"]
        await store.adelete(["goat", "noted"])
        assert agree(store, {id: text for id, text in chunks.items() if id != "goat"})

    asyncio.run(everything())


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
        assert getattr(store, name)(argument, k=2) == getattr(store.inner, name)(argument, k=2)
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


def test_texts_that_cannot_be_encoded(store: BlendVectorStore, chunks: dict[str, str]) -> None:
    store.add_texts(chunks.values(), ids=list(chunks))
    store.add_texts(["   ", "A second text, with letters."], ids=["goat", "second"])
    assert set(store.engine.ids()) == {"mara", "works", "house", "second"}
    with pytest.raises(PromptTooLongError):
        store.add_texts(["word " * 3000, "Yet another text."], ids=["house", "third"])
    # The inner store has replaced its text, so the old one's KV is gone.
    assert set(store.engine.ids()) == {"mara", "works", "second"}
    assert isinstance(PromptTooLongError("x"), CacheBlendError)


def test_index_keeps_exactly_the_live_documents(store: BlendVectorStore, chunks: dict[str, str]) -> None:
    records = InMemoryRecordManager("test")
    records.create_schema()

    def run(texts: list[str]) -> set[str]:
        documents = [Document(text, metadata={"source": "one"}) for text in texts]
        index(documents, records, store, cleanup="full", source_id_key="source", key_encoder="sha256")
        found = store.get_by_ids(store.engine.ids()) if store.engine.ids() else []
        assert len(found) == len(store.engine.ids())
        return {document.page_content for document in found}

    texts = list(chunks.values())
    assert run(texts) == set(texts)
    assert run(texts) == set(texts)
    assert run([*texts[1:], "A new text in its place."]) == {*texts[1:], "A new text in its place."}
    assert run([]) == set()


def test_texts_added_in_the_background_are_encoded_by_the_flush(
    embedding: Embeddings, engine: BlendEngine, chunks: dict[str, str]
) -> None:
    inner = InMemoryVectorStore(embedding)
    store = BlendVectorStore.from_texts(
        list(chunks.values()), ids=list(chunks), inner=inner, engine=engine, background=True
    )
    first, second, *rest = chunks
    store.delete([first])
    store.add_texts(["another text"], ids=[second])
    store.flush()
    assert agree(store, {second: "another text"} | {id: chunks[id] for id in rest})
    records = [record for record in engine.records(engine.ids()) if record is not None]
    assert all(engine.store.holds([record.key for record in records]))
    assert engine.store.stats().entries == len({record.key for record in records})


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_documents_of_one_source_are_neighbours(
    embedding: Embeddings,
    tiny: Any,
    tokenizer: Any,
    chunks: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    asynchronous: bool,
) -> None:
    sources = {"mara": "a", "works": "b", "house": "a", "goat": "a"}
    found: dict[str | None, tuple[str, ...]] = {}
    with BlendEngine(tiny, tokenizer, config=BlendConfig(self_check=False, selector="ingest")) as engine:
        add = engine.add

        def noting(added: list[Chunk], **options: Any) -> Any:
            found.update({chunk.id: tuple(chunk.neighbours) for chunk in added})
            return add(added, **options)

        monkeypatch.setattr(engine, "add", noting)
        store = BlendVectorStore(INNER["chroma"](embedding), engine=engine)
        documents = [Document(text, id=id, metadata={"source": sources[id]}) for id, text in chunks.items()]
        documents.append(Document("Of a source that nobody knows.", id="other"))
        await store.aadd_documents(documents) if asynchronous else store.add_documents(documents)
        # The first of a source stands behind those after it; without others of its source the engine decides.
        assert found == {
            "mara": ("house", "goat"),
            "works": (),
            "house": ("mara",),
            "goat": ("mara", "house"),
            "other": (),
        }
        records = engine.records(list(found))
        readers = [engine.store.open(record.key) for record in records if record is not None]
        assert all(reader is not None and reader.sensitivity for reader in readers)
        found.clear()
        ids = ["x", "y", "z"]
        store.add_texts(
            ["One text.", "Two texts.", "Three."], [{"source": "s"}, {"source": 7}, {"source": "s"}], ids=ids
        )
        store.add_texts(["Four."], ids=["w"])
        assert found == {"x": ("z",), "y": (), "z": ("x",), "w": ()}
