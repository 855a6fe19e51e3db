"""The vector store that has KV encoded, and the retriever that has it fetched while postprocessors work."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Settings, StorageContext, VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import BaseNode, NodeRelationship, QueryBundle, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, VectorStoreQuery
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQueryResult
from llama_index.vector_stores.chroma import ChromaVectorStore
from pydantic import Field
from transformers import LlamaForCausalLM

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from cacheblend_rag.errors import ConfigError
from integrations.llama_index.tests.conftest import FACTS, MakeLLM, Nodes, WordEmbedding
from llama_index_cacheblend import BlendLLM, BlendRetriever, BlendSynthesizer, BlendVectorStore
from llama_index_cacheblend.nodes import node_chunks


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


@pytest.fixture
def store(inner: BasePydanticVectorStore, engine: BlendEngine, embedding: WordEmbedding) -> BlendVectorStore:
    store = BlendVectorStore(inner, engine=engine)
    assert store.add(some_nodes(embedding)) == ["n0", "n1", "n2", "n3", "n4"]
    return store


def held(store: BlendVectorStore) -> set[str]:
    query = VectorStoreQuery(query_embedding=[1.0] * 64, similarity_top_k=99)
    return set(store.query(query).ids or [])


def known(engine: BlendEngine, misses: Collection[str] = ()) -> set[str]:
    """Ids that the engine knows, all but these with their KV."""
    engine.flush()
    records = [record for record in engine.records(engine.ids()) if record is not None]
    assert {record.id for record in records if record.later is None or not engine.store.holds([record.id])[0]} == set(
        misses
    )
    return set(engine.ids())


def test_blank_nodes_are_not_encoded(store: BlendVectorStore, engine: BlendEngine, embedding: WordEmbedding) -> None:
    blank = TextNode(id_="n0", text=" \n", embedding=embedding.get_text_embedding("blank"))
    store.add([blank])
    assert "n0" in held(store)
    assert not engine.contains("n0")


@pytest.mark.parametrize("background", [False, True])
def test_a_node_beyond_the_window_is_stored_without_kv(
    inner: BasePydanticVectorStore,
    engine: BlendEngine,
    embedding: WordEmbedding,
    caplog: pytest.LogCaptureFixture,
    background: bool,
) -> None:
    store = BlendVectorStore(inner, engine=engine, background=background)
    store.add(some_nodes(embedding))
    long = TextNode(id_="n0", text="word " * 2000, embedding=embedding.get_text_embedding("long"))
    added = store.add([TextNode(id_="new", text="New.", embedding=embedding.get_text_embedding("new")), long])
    store.flush()
    assert added == ["new", "n0"]
    assert held(store) == {"n0", "n1", "n2", "n3", "n4", "new"}
    # What n0 stood for before is gone too, and what was read behind it.
    assert known(engine, misses=["n2", "n4"]) == {"n1", "n2", "n3", "n4", "new"}
    assert "node n0 is stored without KV: chunk 'n0' has 4000 tokens" in caplog.text


def test_what_chroma_refuses_is_lost(chroma: ChromaVectorStore, engine: BlendEngine, embedding: WordEmbedding) -> None:
    store = BlendVectorStore(chroma, engine=engine)
    store.add(some_nodes(embedding))
    bad = TextNode(id_="bad", text="Its embedding is too short.", embedding=[1.0, 2.0])
    with pytest.raises(Exception, match="dimension"):
        store.add([bad])
    assert held(store) == known(engine)


def test_kv_that_finds_no_room_keeps_no_node_out(
    chroma: ChromaVectorStore,
    make_llm: MakeLLM,
    embedding: WordEmbedding,
    model: Any,
    tokenizer: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = BlendEngine(model, tokenizer, **engine_settings(ram_bytes=1, self_check=False))
    llm = BlendLLM(engine=engine, max_new_tokens=8)
    store = BlendVectorStore(chroma, engine=engine)
    with caplog.at_level(logging.WARNING):
        store.add(some_nodes(embedding))
    assert "computed at query time" in caplog.text
    assert len(held(store)) == 5
    index = VectorStoreIndex.from_vector_store(store, embed_model=embedding)
    nodes = index.as_retriever(similarity_top_k=3).retrieve("Where was Mara Lindell born?")
    assert BlendSynthesizer(llm=llm).synthesize("Where was Mara?", nodes).metadata["blend"]["misses"] == 3
    engine.close()


def test_only_vector_stores_are_wrapped(engine: BlendEngine, chroma: ChromaVectorStore) -> None:
    with pytest.raises(ConfigError, match="ChromaVectorStore"):
        BlendVectorStore(chroma.client, engine=engine)
    store = BlendVectorStore(chroma, engine=engine)
    with pytest.raises(ConfigError, match=r"already; use it as it is, or .*BlendVectorStore\(store.inner, ...\)"):
        BlendVectorStore(store, engine=engine)
    with pytest.raises(ConfigError, match="parents is a StorageContext; give a docstore"):
        BlendVectorStore(chroma, engine=engine, parents=StorageContext.from_defaults())  # type: ignore[arg-type]


def test_the_engine_is_the_models_or_that_of_the_settings(
    llm: BlendLLM, chroma: ChromaVectorStore, embedding: WordEmbedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "_llm", None)
    with pytest.raises(ConfigError, match="it is not said which engine"):
        BlendVectorStore(chroma)
    with pytest.raises(ConfigError, match="engine='reference' is a str, which computes no KV"):
        BlendVectorStore(chroma, engine="reference")  # type: ignore[arg-type]
    given = BlendVectorStore(chroma, engine=llm)
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

    def clear(self) -> None:
        self.nodes = {}

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return VectorStoreQueryResult(nodes=list(self.nodes.values()), ids=list(self.nodes))


def test_stores_that_cannot_list_their_nodes(engine: BlendEngine, embedding: WordEmbedding) -> None:
    store = BlendVectorStore(Unlisted(), engine=engine)
    store.add(some_nodes(embedding))
    store.add(some_nodes(embedding)[:2])
    store.delete("d1")
    assert held(store) == known(engine) == {"n0", "n2", "n4"}
    store.clear()
    assert held(store) == known(engine) == set()


def test_what_a_store_cannot(engine: BlendEngine, embedding: WordEmbedding, caplog: pytest.LogCaptureFixture) -> None:
    store = BlendVectorStore(Unlisted(), engine=engine)
    store.add(some_nodes(embedding))
    with pytest.raises(NotImplementedError):
        store.delete_nodes(filters=MetadataFilters(filters=[MetadataFilter(key="side", value=1)]))
    assert "cannot list these nodes" in caplog.text
    assert len(known(engine)) == 5


def test_flushing_encodes_nodes(inner: BasePydanticVectorStore, engine: BlendEngine, embedding: WordEmbedding) -> None:
    store = BlendVectorStore(inner, engine=engine, background=True, show_progress=True)
    assert store.add(some_nodes(embedding)) == ["n0", "n1", "n2", "n3", "n4"]
    assert set(engine.ids()) == {"n0", "n1", "n2", "n3", "n4"}
    store.delete("d1")
    store.flush()
    assert held(store) == known(engine) == {"n0", "n2", "n4"}
    assert engine._store.stats().entries == 2 * 3


def test_nodes_that_the_inner_store_refuses_are_not_encoded_in_the_background(
    chroma: ChromaVectorStore, engine: BlendEngine, embedding: WordEmbedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlendVectorStore(chroma, engine=engine, background=True)

    def refuse(*args: Any, **kwargs: Any) -> list[str]:
        raise OSError("no room")

    monkeypatch.setattr(ChromaVectorStore, "add", refuse)
    with pytest.raises(OSError, match="no room"):
        store.add(some_nodes(embedding))
    store.flush()
    assert engine.ids() == []
    assert engine._store.stats().entries == 0


QUESTION = "Where was Mara Lindell born?"


@pytest.fixture
def disk_llm(tmp_path: Path, model: LlamaForCausalLM, tokenizer: Any, nodes: Nodes) -> Iterator[BlendLLM]:
    """A model whose chunks are on disk, and nothing in RAM."""
    settings = engine_settings(recompute_ratio=0.15, self_check=False, selector="hkvd")
    with BlendEngine(model, tokenizer, store=tmp_path, **settings) as first:
        first.add(node_chunks(each.node for each in nodes))
    with BlendEngine(model, tokenizer, store=tmp_path, **settings) as engine:
        yield BlendLLM(engine=engine, max_new_tokens=6)


@pytest.fixture
def index(nodes: Nodes, embedding: WordEmbedding) -> VectorStoreIndex:
    return VectorStoreIndex([each.node for each in nodes], embed_model=embedding)


class Waits(BaseNodePostprocessor):
    """Works for as long as it takes that the KV is in RAM, and keeps the first nodes."""

    ram_bytes: Callable[[], int]
    keeps: int = 3
    found_s: float = -1.0

    def _postprocess_nodes(self, nodes: Nodes, query_bundle: QueryBundle | None = None) -> Nodes:
        started = time.monotonic()
        while not self.ram_bytes() and time.monotonic() < started + 60:
            time.sleep(0.01)
        # The last chunk may still be on its way, which its prompt waits for.
        self.found_s = time.monotonic() - started
        return nodes[: self.keeps]


def test_kv_comes_to_ram_while_postprocessors_work(disk_llm: BlendLLM, index: VectorStoreIndex) -> None:
    assert disk_llm.engine._store.stats().ram_bytes == 0
    waits = Waits(ram_bytes=lambda: disk_llm.engine._store.stats().ram_bytes)
    engine = RetrieverQueryEngine(
        BlendRetriever(index.as_retriever(similarity_top_k=5), disk_llm),
        BlendSynthesizer(llm=disk_llm),
        node_postprocessors=[waits],
    )
    response = engine.query(QUESTION)
    assert 0 <= waits.found_s < 60
    chunks = response.metadata["blend"]["chunks"]
    assert len(chunks) == 3
    assert "ram" in [chunk["tier"] for chunk in chunks]


@pytest.mark.parametrize("form", ["sync", "async"])
def test_it_retrieves_what_the_other_one_does(form: str, disk_llm: BlendLLM, index: VectorStoreIndex) -> None:
    plain = index.as_retriever(similarity_top_k=4)
    fetching = BlendRetriever(plain, engine=disk_llm.engine, limit=2)

    def shown(retriever: Any) -> list[tuple[str, float | None]]:
        found = retriever.retrieve(QUESTION) if form == "sync" else asyncio.run(retriever.aretrieve(QUESTION))
        return [(each.node_id, each.score) for each in found]

    assert shown(fetching) == shown(plain)
    names = [name for name, _ in shown(plain)]
    assert disk_llm.engine.prefetch(names[:2]).wait(60)
    one_chunk = disk_llm.engine._store.stats().ram_bytes / 2
    # Only two of the four: the third costs as much again, more or less.
    assert disk_llm.engine.prefetch(names).wait(60)
    assert disk_llm.engine._store.stats().ram_bytes > 2.5 * one_chunk


def test_what_it_does_not_know_is_the_retrievers(disk_llm: BlendLLM, index: VectorStoreIndex) -> None:
    plain = index.as_retriever(similarity_top_k=4)
    fetching = BlendRetriever(plain, disk_llm)
    assert fetching.retriever is plain
    assert fetching.similarity_top_k == 4
    assert fetching._get_prompt_modules() == {"retriever": plain}
    with pytest.raises(AttributeError):
        fetching.no_such_thing  # noqa: B018


def test_arguments_that_make_no_sense_are_refused(disk_llm: BlendLLM, index: VectorStoreIndex) -> None:
    plain = index.as_retriever()
    for arguments in ({}, {"llm": disk_llm, "engine": disk_llm.engine}):
        with pytest.raises(ConfigError, match="either llm"):
            BlendRetriever(plain, **arguments)
    with pytest.raises(ConfigError, match="MockLLM, which has no stored KV"):
        BlendRetriever(plain, MockLLM())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="limit=0 fetches nothing"):
        BlendRetriever(plain, disk_llm, limit=0)
