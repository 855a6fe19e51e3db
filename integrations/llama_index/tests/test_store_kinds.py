"""Chroma, Qdrant and LlamaIndex's own store, each wrapped: whatever an index or a pipeline does to them, nodes and KV agree."""

import asyncio
import pickle
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import chromadb
import pytest
import qdrant_client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core import Document, MockEmbedding, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore, VectorStoreQuery
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQueryMode
from llama_index.vector_stores.chroma import ChromaVectorStore
from llama_index.vector_stores.qdrant import QdrantVectorStore

from cacheblend_rag.chunk import text_hash
from cacheblend_rag.errors import ConfigError
from integrations.llama_index.tests.conftest import FACTS, WordEmbedding
from integrations.llama_index.tests.test_vector_store import known
from integrations.llama_index.tests.test_vector_store import some_nodes as named_nodes
from llama_index_cacheblend import BlendLLM, BlendSynthesizer, BlendVectorStore

KINDS = ["chroma", "qdrant", "simple"]


def node_id(number: int) -> str:
    """An id that Qdrant takes, which wants UUIDs."""
    return str(uuid.UUID(int=number + 1))


some_nodes = partial(named_nodes, name=node_id)

IDS = [node_id(number) for number in range(len(FACTS))]


def make_inner(kind: str, asynchronous: bool) -> BasePydanticVectorStore:
    if kind == "simple":
        return SimpleVectorStore()
    name = f"kinds-{uuid.uuid4().hex}"
    if kind == "chroma":
        return ChromaVectorStore(chroma_collection=chromadb.EphemeralClient().create_collection(name))
    # Clients in memory share nothing, so that a store has one of the two. They warn of an index that only a server makes.
    if asynchronous:
        return QdrantVectorStore(name, aclient=qdrant_client.AsyncQdrantClient(":memory:"), index_doc_id=False)
    return QdrantVectorStore(name, client=qdrant_client.QdrantClient(":memory:"), index_doc_id=False)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(kind: str, asynchronous: bool, llm: BlendLLM) -> BlendVectorStore:
    return BlendVectorStore(make_inner(kind, asynchronous), engine=llm.engine)


@pytest.fixture
def call(asynchronous: bool) -> Callable[..., Any]:
    """Calls a method of a store, an index or a pipeline, or its asynchronous form."""

    async def method(target: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if not asynchronous:
            return getattr(target, name)(*args, **kwargs)
        return await getattr(target, "async_add" if name == "add" else f"a{name}")(*args, **kwargs)

    return method


async def held(store: BlendVectorStore, asynchronous: bool) -> set[str]:
    query = VectorStoreQuery(query_embedding=[1.0] * 64, similarity_top_k=99)
    try:
        result = await store.aquery(query) if asynchronous else store.query(query)
    except ValueError as error:
        # What Qdrant says of a collection that nothing was added to.
        if "not found" not in str(error):
            raise
        return set()
    return set(result.ids or [])


async def test_additions_and_deletions(
    store: BlendVectorStore, kind: str, call: Callable[..., Any], asynchronous: bool, embedding: WordEmbedding
) -> None:
    engine = store.engine
    side = MetadataFilters(filters=[MetadataFilter(key="side", value=0)])
    assert await call(store, "add", some_nodes(embedding)) == IDS
    assert await held(store, asynchronous) == known(engine) == set(IDS)
    await call(store, "delete", "d1")
    assert await held(store, asynchronous) == known(engine) == {IDS[0], IDS[2], IDS[4]}
    await call(store, "delete_nodes", [IDS[4], node_id(99)])
    await call(store, "delete", "no such document")
    nobody = MetadataFilters(filters=[MetadataFilter(key="side", value=7)])
    await call(store, "delete_nodes", filters=nobody)
    assert await held(store, asynchronous) == known(engine) == {IDS[0], IDS[2]}
    await call(store, "delete_nodes", filters=side)
    assert await held(store, asynchronous) == known(engine) == set()
    await call(store, "add", some_nodes(embedding))
    for _ in range(2):
        await call(store, "clear")
    assert await held(store, asynchronous) == known(engine) == set()
    assert engine._store.stats().entries == 0
    await call(store, "add", some_nodes(embedding)[:1])
    await call(store, "add", some_nodes(embedding, ["Another text."]))
    assert await held(store, asynchronous) == known(engine) == {IDS[0]}
    # Of each node what serves a prompt's first chunk, and what serves the others.
    assert engine._store.stats().entries == 2
    if kind != "simple":
        nodes = await store.aget_nodes([IDS[0]]) if asynchronous else store.get_nodes([IDS[0]])
        assert [node.get_content() for node in nodes] == ["Another text."]


async def test_deleting_without_ids_forgets_what_a_store_may_take_for_all(
    store: BlendVectorStore, kind: str, call: Callable[..., Any], asynchronous: bool, embedding: WordEmbedding
) -> None:
    await call(store, "add", some_nodes(embedding))
    if kind == "chroma":
        with pytest.raises(ValueError, match="non-empty"):
            await call(store, "delete_nodes")
        assert len(await held(store, asynchronous)) == 5
    else:
        await call(store, "delete_nodes")
        assert await held(store, asynchronous) == set()
    assert known(store.engine) == set()


async def test_documents_of_an_index(
    store: BlendVectorStore, call: Callable[..., Any], asynchronous: bool, llm: BlendLLM, embedding: WordEmbedding
) -> None:
    made = VectorStoreIndex([], storage_context=StorageContext.from_defaults(vector_store=store), embed_model=embedding)
    documents = [Document(text=text, id_=f"d{number}") for number, text in enumerate(FACTS)]
    assert await call(made, "refresh_ref_docs", documents) == [True] * 5
    synthesizer = BlendSynthesizer(llm=llm)

    async def ask() -> tuple[set[str], dict[str, Any]]:
        retriever = made.as_retriever(similarity_top_k=9)
        nodes = await (retriever.aretrieve("Mara?") if asynchronous else asyncio.to_thread(retriever.retrieve, "Mara?"))
        response = await synthesizer.asynthesize("Mara?", nodes)
        return {each.text for each in nodes}, response.metadata["blend"]

    texts = set(FACTS)
    changed = Document(text="Mara Lindell was born in Lisbon.", id_="d0")
    for name, argument, gone, come in [
        ("update_ref_doc", changed, FACTS[0], changed.text),
        ("refresh_ref_docs", [changed, Document(text="Otto sails.", id_="d2")], FACTS[2], "Otto sails."),
        ("delete_ref_doc", "d1", FACTS[1], None),
    ]:
        keep = {"delete_from_docstore": True} if name == "delete_ref_doc" else {}
        await call(made, name, argument, **keep)
        texts = texts - {gone} | ({come} if come else set())
        found, report = await ask()
        assert found == texts
        assert (report["hits"], report["misses"]) == (len(texts), 0)
        assert await held(store, asynchronous) == known(store.engine)
        # The template's own words before the nodes have KV too; what the first of them had seen may be gone.
        records = [each for each in store.engine.records(sorted(known(store.engine))) if each is not None]
        keys = {key for each in records for key in each.keys}
        assert store.engine._store.stats().entries == len(keys) + len(store.engine.heads())


@pytest.mark.parametrize("strategy", list(DocstoreStrategy))
async def test_pipeline(
    store: BlendVectorStore,
    call: Callable[..., Any],
    asynchronous: bool,
    embedding: WordEmbedding,
    strategy: DocstoreStrategy,
) -> None:
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=24, chunk_overlap=0), embedding],
        vector_store=store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=strategy,
    )
    first = [Document(text=" ".join(FACTS), id_="long"), Document(text="Lena dives.", id_="short")]
    nodes = await call(pipeline, "run", documents=first)
    assert len(nodes) > 2
    assert await held(store, asynchronous) == known(store.engine) == {node.node_id for node in nodes}
    assert await call(pipeline, "run", documents=first) == []
    second = await call(pipeline, "run", documents=[Document(text="Mara bakes.", id_="long")])
    live = {node.node_id for node in second}
    if strategy == DocstoreStrategy.DUPLICATES_ONLY:
        live |= {node.node_id for node in nodes}
    if strategy == DocstoreStrategy.UPSERTS:
        live |= {node.node_id for node in nodes if node.ref_doc_id == "short"}
    assert await held(store, asynchronous) == known(store.engine) == live
    assert store.engine._store.stats().entries == 2 * len(live)


def test_a_store_is_not_sent_to_another_process(llm: BlendLLM) -> None:
    with pytest.raises(ConfigError, match="holds the model"):
        pickle.dumps(BlendVectorStore(SimpleVectorStore(), engine=llm.engine))


@pytest.mark.parametrize(("kind", "asynchronous"), [("chroma", False), ("simple", False)])
async def test_queries_of_every_mode(store: BlendVectorStore, kind: str, embedding: WordEmbedding) -> None:
    store.add(some_nodes(embedding))
    modes = [VectorStoreQueryMode.DEFAULT, VectorStoreQueryMode.MMR]
    if kind == "simple":
        modes += [VectorStoreQueryMode.LINEAR_REGRESSION, VectorStoreQueryMode.LOGISTIC_REGRESSION]
    for mode in modes:
        query = VectorStoreQuery(query_embedding=embedding.get_query_embedding("office"), similarity_top_k=2, mode=mode)
        options = {"mmr_threshold": 0.5} if mode == VectorStoreQueryMode.MMR else {}
        ours, theirs = store.query(query, **options), store.inner.query(query, **options)
        assert ours.ids == theirs.ids
        assert ours.similarities is not None and theirs.similarities is not None
        assert list(ours.similarities) == pytest.approx(list(theirs.similarities), abs=1e-4)
        assert len(ours.ids or []) == 2


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=30)
# JSON, in which stores keep metadata, has no infinity: its text changes in the store, and is encoded when it is retrieved.
FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)
VALUE = st.one_of(TEXT, st.integers(-(2**31), 2**31), FLOATS, st.none())


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=TEXT,
    metadata=st.dictionaries(st.text("abcdef", min_size=1, max_size=4), VALUE, max_size=3),
    excluded_llm_metadata_keys=st.lists(st.text("abcdef", min_size=1, max_size=4), max_size=2),
    text_template=st.sampled_from(["{metadata_str}\n\n{content}", "{content}", "<{content}> [{metadata_str}]"]),
    metadata_template=st.sampled_from(["{key}: {value}", "{value}"]),
    metadata_separator=st.sampled_from(["\n", "; "]),
)
def test_what_is_encoded_is_what_is_retrieved(llm: BlendLLM, **parts: Any) -> None:
    node = TextNode(id_=IDS[0], **parts)
    for kind in KINDS:
        store = BlendVectorStore(make_inner(kind, False), engine=llm.engine)
        index = VectorStoreIndex(
            [], storage_context=StorageContext.from_defaults(vector_store=store), embed_model=MockEmbedding(embed_dim=8)
        )
        index.insert_nodes([node])
        [found] = index.as_retriever().retrieve("Mara?")
        shown = found.node.get_content(MetadataMode.LLM).strip()
        [record] = llm.engine.records(IDS[:1])
        assert (record is not None) == bool(shown)
        assert record is None or record.text_hash == text_hash(shown)
        store.clear()
        assert llm.engine.ids() == []


def test_an_index_is_persisted_and_loaded(llm: BlendLLM, embedding: WordEmbedding, tmp_path: Path) -> None:
    store = BlendVectorStore(SimpleVectorStore(), engine=llm.engine)
    index = VectorStoreIndex.from_documents(
        [Document(text=text, id_=f"d{number}") for number, text in enumerate(FACTS)],
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=embedding,
    )
    index.storage_context.persist(str(tmp_path))
    again = BlendVectorStore(SimpleVectorStore.from_persist_dir(str(tmp_path)), engine=llm.engine)
    context = StorageContext.from_defaults(persist_dir=str(tmp_path), vector_store=again)
    loaded = load_index_from_storage(context, embed_model=embedding)
    assert loaded.refresh_ref_docs([Document(text=FACTS[0], id_="d0"), Document(text="New", id_="d1")]) == [False, True]
    nodes = loaded.as_retriever(similarity_top_k=9).retrieve("Mara?")
    assert {each.text for each in nodes} == {*FACTS, "New"} - {FACTS[1]}
    assert known(llm.engine) == {each.node_id for each in nodes}
    loaded.delete_ref_doc("d2", delete_from_docstore=True)
    assert len(known(llm.engine)) == 4


@pytest.fixture(autouse=True)
def _no_collections_left() -> Iterator[None]:
    yield
    client = chromadb.EphemeralClient()
    for collection in client.list_collections():
        if collection.name.startswith("kinds-"):
            client.delete_collection(collection.name)
