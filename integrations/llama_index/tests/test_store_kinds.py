"""Chroma, Qdrant and LlamaIndex's own store, each wrapped: whatever an index or a pipeline does to them, nodes and KV agree."""

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
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index.vector_stores.chroma import ChromaVectorStore
from llama_index.vector_stores.qdrant import QdrantVectorStore

from cacheblend_rag.chunk import text_hash
from integrations.llama_index.tests.conftest import FACTS, WordEmbedding
from integrations.llama_index.tests.test_vector_store import known
from integrations.llama_index.tests.test_vector_store import some_nodes as named_nodes
from llama_index_cacheblend import BlendLLM, BlendVectorStore

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
    side, nobody = (MetadataFilters(filters=[MetadataFilter(key="side", value=value)]) for value in (0, 7))
    assert await call(store, "add", some_nodes(embedding)) == IDS
    assert await held(store, asynchronous) == known(engine) == set(IDS)
    await call(store, "delete", "d1")
    assert await held(store, asynchronous) == known(engine) == {IDS[0], IDS[2], IDS[4]}
    await call(store, "delete_nodes", [IDS[4], node_id(99)])
    await call(store, "delete", "no such document")
    await call(store, "delete_nodes", filters=nobody)
    assert await held(store, asynchronous) == known(engine) == {IDS[0], IDS[2]}
    await call(store, "delete_nodes", filters=side)
    assert await held(store, asynchronous) == known(engine) == set()
    await call(store, "add", some_nodes(embedding))
    for _ in range(2):
        await call(store, "clear")
    assert await held(store, asynchronous) == known(engine) == set()
    assert engine.store.stats().entries == 0
    await call(store, "add", some_nodes(embedding)[:1])
    await call(store, "add", some_nodes(embedding, ["Another text."]))
    assert await held(store, asynchronous) == known(engine) == {IDS[0]}
    # Of each node what serves a prompt's first chunk, and what serves the others.
    assert engine.store.stats().entries == 2
    if kind != "simple":
        nodes = await store.aget_nodes([IDS[0]]) if asynchronous else store.get_nodes([IDS[0]])
        assert [node.get_content() for node in nodes] == ["Another text."]


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
    assert store.engine.store.stats().entries == 2 * len(live)


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
    def load() -> VectorStoreIndex:
        store = BlendVectorStore(SimpleVectorStore.from_persist_dir(str(tmp_path)), engine=llm.engine)
        context = StorageContext.from_defaults(persist_dir=str(tmp_path), vector_store=store)
        index: Any = load_index_from_storage(context, embed_model=embedding)
        return index

    store = BlendVectorStore(SimpleVectorStore(), engine=llm.engine)
    documents = [Document(text=text, id_=f"d{number}") for number, text in enumerate(FACTS)]
    context = StorageContext.from_defaults(vector_store=store)
    VectorStoreIndex.from_documents(documents, context, embed_model=embedding).storage_context.persist(str(tmp_path))
    del store, context
    loaded = load()
    assert loaded.refresh_ref_docs([Document(text=FACTS[0], id_="d0"), Document(text="New", id_="d1")]) == [False, True]
    nodes = loaded.as_retriever(similarity_top_k=9).retrieve("Mara?")
    assert {each.text for each in nodes} == {*FACTS, "New"} - {FACTS[1]}
    assert known(llm.engine) == {each.node_id for each in nodes}


@pytest.fixture(autouse=True)
def _no_collections_left() -> Iterator[None]:
    yield
    client = chromadb.EphemeralClient()
    for collection in client.list_collections():
        if collection.name.startswith("kinds-"):
            client.delete_collection(collection.name)
