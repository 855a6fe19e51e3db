"""The vector store that has KV encoded, over Chroma, Qdrant and LlamaIndex's own: whatever is done to it, nodes and KV agree."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import chromadb
import pytest
import qdrant_client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core import Document, MockEmbedding, Settings, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    RelatedNodeInfo,
    TextNode,
)
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore, VectorStoreQuery
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQueryResult
from llama_index.vector_stores.chroma import ChromaVectorStore
from llama_index.vector_stores.qdrant import QdrantVectorStore
from pydantic import Field
from transformers import LlamaForCausalLM

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from cacheblend_rag.chunk import text_hash
from cacheblend_rag.errors import ConfigError
from integrations.llama_index.tests.conftest import FACTS, Nodes, WordEmbedding
from llama_index_cacheblend import BlendLLM, BlendRetriever, BlendSynthesizer, BlendVectorStore
from llama_index_cacheblend.nodes import node_chunks

QUESTION = "Where was Mara Lindell born?"


def some_nodes(embedding: WordEmbedding, texts: list[str] = FACTS, name: Any = "n{}".format) -> list[TextNode]:
    """Nodes n0, n1, ... of which the even ones belong to document d0 and the odd ones to d1."""
    return [
        TextNode(
            id_=name(number),
            text=text,
            metadata={"side": number % 2},
            embedding=embedding.get_text_embedding(text),
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"d{number % 2}")},
        )
        for number, text in enumerate(texts)
    ]


@pytest.fixture
def engine(llm: BlendLLM) -> BlendEngine:
    return llm.engine


def held(store: BlendVectorStore) -> set[str]:
    query = VectorStoreQuery(query_embedding=[1.0] * 64, similarity_top_k=99)
    return set(store.query(query).ids or [])


def known(engine: BlendEngine, misses: Collection[str] = ()) -> set[str]:
    """Ids that the engine knows, all but these with their KV."""
    engine.flush()
    records = [record for record in engine.records(engine.ids()) if record is not None]
    without = {record.id for record in records if record.later is None or not engine.store.holds([record.id])[0]}
    assert without == set(misses)
    return set(engine.ids())


@pytest.mark.parametrize("background", [False, True])
def test_what_cannot_be_encoded_is_added_without_kv(
    inner: BasePydanticVectorStore, engine: BlendEngine, embedding: WordEmbedding, background: bool
) -> None:
    store = BlendVectorStore(inner, engine=engine, background=background, show_progress=True)
    assert store.add(some_nodes(embedding)) == ["n0", "n1", "n2", "n3", "n4"]
    long = TextNode(id_="n0", text="word " * 2000, embedding=embedding.get_text_embedding("long"))
    blank = TextNode(id_="n1", text=" \n", embedding=embedding.get_text_embedding("blank"))
    new = TextNode(id_="new", text="New.", embedding=embedding.get_text_embedding("new"))
    assert store.add([new, long, blank]) == ["new", "n0", "n1"]
    store.flush()
    assert held(store) == {"n0", "n1", "n2", "n3", "n4", "new"}
    # What n0 and n1 stood for before is gone too, and what was read behind them.
    assert known(engine, misses=["n2", "n3", "n4"]) == {"n2", "n3", "n4", "new"}


def test_what_a_killed_call_has_encoded_is_not_encoded_again(
    chroma: ChromaVectorStore, engine: BlendEngine, embedding: WordEmbedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, nodes = BlendVectorStore(chroma, engine=engine), some_nodes(embedding)
    # It died before the nodes were in the inner store; the next one cuts the same documents into nodes of other ids.
    store._encoder.encode(nodes)
    again = [node.model_copy(update={"id_": f"again-{node.node_id}"}) for node in nodes]
    monkeypatch.setattr(engine._supply, "encode", lambda *given, **options: pytest.fail("it was encoded again"))
    store.add(again)
    assert held(store) == known(engine) == {node.node_id for node in again}


@pytest.mark.parametrize("background", [False, True])
def test_what_the_inner_store_refuses_is_forgotten(
    chroma: ChromaVectorStore, engine: BlendEngine, embedding: WordEmbedding, background: bool
) -> None:
    store = BlendVectorStore(chroma, engine=engine, background=background)
    store.add(some_nodes(embedding))
    with pytest.raises(Exception, match="dimension"):
        store.add([TextNode(id_="bad", text="Its embedding is too short.", embedding=[1.0, 2.0])])
    assert held(store) == known(engine)


def test_kv_that_finds_no_room_keeps_no_node_out(
    chroma: ChromaVectorStore,
    embedding: WordEmbedding,
    model: Any,
    tokenizer: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with BlendEngine(model, tokenizer, **engine_settings(ram_bytes=1, self_check=False)) as engine:
        store = BlendVectorStore(chroma, engine=engine)
        with caplog.at_level(logging.WARNING, "llama_index_cacheblend"):
            store.add(some_nodes(embedding))
        assert caplog.records and len(held(store)) == 5
        index = VectorStoreIndex.from_vector_store(store, embed_model=embedding)
        nodes = index.as_retriever(similarity_top_k=3).retrieve(QUESTION)
        answer = BlendSynthesizer(BlendLLM(engine=engine, max_new_tokens=8)).synthesize(QUESTION, nodes)
        assert answer.metadata["blend"]["misses"] == 3


def test_a_text_that_finds_no_room_leaves_nothing_of_the_one_it_replaces(
    chroma: ChromaVectorStore, embedding: WordEmbedding, model: Any, tokenizer: Any
) -> None:
    with BlendEngine(model, tokenizer, **engine_settings(ram_bytes=100_000, self_check=False)) as engine:
        store = BlendVectorStore(chroma, engine=engine)
        store.add(some_nodes(embedding, ["Short.", "Brief."]))
        assert known(engine) == {"n0", "n1"}
        store.add(some_nodes(embedding, ["word " * 300]))
        assert held(store) == known(engine, ["n0"]) == {"n0", "n1"}
        [record] = engine.records(["n0"])
        assert record is not None and len(record.token_ids) >= 300


def test_arguments(
    llm: BlendLLM, chroma: ChromaVectorStore, embedding: WordEmbedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "_llm", None)
    given = BlendVectorStore(chroma, engine=llm)
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (chroma.client, {"engine": llm}),
        (given, {"engine": llm}),
        (chroma, {}),
        (chroma, {"engine": "reference"}),
        (chroma, {"engine": llm, "text_of": "window"}),
        (chroma, {"engine": llm, "boundary": "reader"}),
        (chroma, {"engine": llm, "boundary": [""]}),
    ]
    for inner, options in wrong:
        with pytest.raises(ConfigError):
            BlendVectorStore(inner, **options)
    assert given.add(some_nodes(embedding)) and len(known(llm.engine)) == 5
    monkeypatch.setattr(Settings, "_llm", llm)
    assert BlendVectorStore(chroma).engine is given.engine is llm.engine


class Unlisted(BasePydanticVectorStore):
    """A store with the least that LlamaIndex asks for: it cannot list its nodes or delete them one by one."""

    stores_text: bool = True
    nodes: dict[str, BaseNode] = Field(default_factory=dict)

    @property
    def client(self) -> None:
        return None

    def add(self, nodes: Any, **kwargs: Any) -> list[str]:
        self.nodes.update({node.node_id: node for node in nodes})
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        self.nodes = {key: node for key, node in self.nodes.items() if node.ref_doc_id != ref_doc_id}

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return VectorStoreQueryResult(nodes=list(self.nodes.values()), ids=list(self.nodes))


def test_a_store_that_cannot_list_its_nodes(engine: BlendEngine, embedding: WordEmbedding) -> None:
    store = BlendVectorStore(Unlisted(), engine=engine)
    store.add(some_nodes(embedding))
    store.add(some_nodes(embedding)[:2])
    store.delete("d1")
    assert held(store) == known(engine) == {"n0", "n2", "n4"}
    with pytest.raises(NotImplementedError):
        store.delete_nodes(["n0"])
    assert held(store) == known(engine)


@pytest.mark.parametrize("form", ["sync", "async"])
async def test_kv_of_what_is_retrieved_comes_to_ram(
    form: str, tmp_path: Path, model: LlamaForCausalLM, tokenizer: Any, nodes: Nodes, embedding: WordEmbedding
) -> None:
    plain: Any = VectorStoreIndex([each.node for each in nodes], embed_model=embedding).as_retriever(similarity_top_k=4)
    with BlendEngine(model, tokenizer, store=tmp_path, **engine_settings(self_check=False)) as first:
        first.add(node_chunks(each.node for each in nodes))
    with BlendEngine(model, tokenizer, store=tmp_path, **engine_settings(self_check=False)) as engine:
        fetching = BlendRetriever(plain, engine, limit=2)
        found = fetching.retrieve(QUESTION) if form == "sync" else await fetching.aretrieve(QUESTION)
        assert [each.node_id for each in found] == [each.node_id for each in plain.retrieve(QUESTION)]
        until = time.monotonic() + 60
        while engine.store.stats().ram_bytes == 0 and time.monotonic() < until:
            await asyncio.sleep(0.01)
        response = BlendSynthesizer(BlendLLM(engine=engine, max_new_tokens=2)).synthesize(QUESTION, found)
        tiers = [chunk["tier"] for chunk in response.metadata["blend"]["chunks"]]
        # The prompt may have been quicker than the second read.
        assert "ram" in tiers[:2] and tiers[2:] == ["disk", "disk"]
        # What it does not know is the other's.
        assert fetching.retriever is plain and fetching.similarity_top_k == 4
        with pytest.raises(AttributeError):
            fetching.no_such_thing  # noqa: B018
        with pytest.raises(ConfigError, match="limit"):
            BlendRetriever(plain, BlendLLM(engine=engine), limit=0)


KINDS = ["chroma", "qdrant", "simple"]


def node_id(number: int) -> str:
    """An id that Qdrant takes, which wants UUIDs."""
    return str(uuid.UUID(int=number + 1))


uuid_nodes = partial(some_nodes, name=node_id)

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


async def aheld(store: BlendVectorStore, asynchronous: bool) -> set[str]:
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
    assert await call(store, "add", uuid_nodes(embedding)) == IDS
    assert await aheld(store, asynchronous) == known(engine) == set(IDS)
    await call(store, "delete", "d1")
    assert await aheld(store, asynchronous) == known(engine) == {IDS[0], IDS[2], IDS[4]}
    await call(store, "delete_nodes", [IDS[4], node_id(99)])
    await call(store, "delete", "no such document")
    await call(store, "delete_nodes", filters=nobody)
    assert await aheld(store, asynchronous) == known(engine) == {IDS[0], IDS[2]}
    await call(store, "delete_nodes", filters=side)
    assert await aheld(store, asynchronous) == known(engine) == set()
    await call(store, "add", uuid_nodes(embedding))
    for _ in range(2):
        await call(store, "clear")
    assert await aheld(store, asynchronous) == known(engine) == set()
    assert engine.store.stats().entries == 0
    await call(store, "add", uuid_nodes(embedding)[:1])
    await call(store, "add", uuid_nodes(embedding, ["Another text."]))
    assert await aheld(store, asynchronous) == known(engine) == {IDS[0]}
    # Of each node what serves a prompt's first chunk, and what serves the others.
    assert engine.store.stats().entries == 2
    if kind != "simple":
        nodes = await store.aget_nodes([IDS[0]]) if asynchronous else store.get_nodes([IDS[0]])
        assert [node.get_content() for node in nodes] == ["Another text."]


async def test_what_prompts_brought_has_no_name_and_goes_with_its_document(
    store: BlendVectorStore,
    call: Callable[..., Any],
    llm: BlendLLM,
    embedding: WordEmbedding,
) -> None:
    nodes = uuid_nodes(embedding)
    await call(store.inner, "add", nodes)
    await asyncio.to_thread(BlendSynthesizer(llm).synthesize, QUESTION, [NodeWithScore(node=node) for node in nodes])
    llm.engine.flush()
    assert llm.engine.ids() == [] and llm.engine.store.stats().entries > len(IDS) / 2
    for document in {str(node.ref_doc_id) for node in nodes}:
        await call(store, "delete", document)
    llm.engine.delete(llm.engine.heads())
    assert llm.engine.store.stats().entries == 0


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
    assert await aheld(store, asynchronous) == known(store.engine) == {node.node_id for node in nodes}
    assert await call(pipeline, "run", documents=first) == []
    second = await call(pipeline, "run", documents=[Document(text="Mara bakes.", id_="long")])
    live = {node.node_id for node in second}
    if strategy == DocstoreStrategy.DUPLICATES_ONLY:
        live |= {node.node_id for node in nodes}
    if strategy == DocstoreStrategy.UPSERTS:
        live |= {node.node_id for node in nodes if node.ref_doc_id == "short"}
    assert await aheld(store, asynchronous) == known(store.engine) == live
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


@pytest.fixture(autouse=True)
def _no_collections_left() -> Iterator[None]:
    yield
    client = chromadb.EphemeralClient()
    for collection in client.list_collections():
        if collection.name.startswith("kinds-"):
            client.delete_collection(collection.name)
