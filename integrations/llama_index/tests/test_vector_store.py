"""The vector store that has KV encoded, and the retriever that has it fetched while postprocessors work."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import BaseNode, NodeRelationship, QueryBundle, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import VectorStoreQuery
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQueryResult
from llama_index.vector_stores.chroma import ChromaVectorStore
from pydantic import Field
from transformers import LlamaForCausalLM

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
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


@pytest.fixture
def disk_llm(tmp_path: Path, model: LlamaForCausalLM, tokenizer: Any, nodes: Nodes) -> Iterator[BlendLLM]:
    """A model whose chunks are on disk, and nothing in RAM."""
    settings = engine_settings(recompute_ratio=0.15, self_check=False, selector="hkvd")
    with BlendEngine(model, tokenizer, store=tmp_path, **settings) as first:
        first.add(node_chunks(each.node for each in nodes))
    with BlendEngine(model, tokenizer, store=tmp_path, **settings) as engine:
        yield BlendLLM(engine=engine, max_new_tokens=6)


@pytest.fixture
def plain(nodes: Nodes, embedding: WordEmbedding) -> Any:
    return VectorStoreIndex([each.node for each in nodes], embed_model=embedding).as_retriever(similarity_top_k=4)


class Waits(BaseNodePostprocessor):
    """Works for as long as it takes that the KV is in RAM, and keeps the first nodes."""

    ram_bytes: Callable[[], int]

    def _postprocess_nodes(self, nodes: Nodes, query_bundle: QueryBundle | None = None) -> Nodes:
        started = time.monotonic()
        while not self.ram_bytes() and time.monotonic() < started + 60:
            time.sleep(0.01)
        return nodes[:3]


def test_kv_comes_to_ram_while_postprocessors_work(disk_llm: BlendLLM, plain: Any) -> None:
    assert disk_llm.engine.store.stats().ram_bytes == 0
    engine = RetrieverQueryEngine(
        BlendRetriever(plain, disk_llm),
        BlendSynthesizer(llm=disk_llm),
        node_postprocessors=[Waits(ram_bytes=lambda: disk_llm.engine.store.stats().ram_bytes)],
    )
    chunks = engine.query(QUESTION).metadata["blend"]["chunks"]
    assert len(chunks) == 3
    assert "ram" in [chunk["tier"] for chunk in chunks]


@pytest.mark.parametrize("form", ["sync", "async"])
def test_it_retrieves_what_the_other_one_does(form: str, disk_llm: BlendLLM, plain: Any) -> None:
    fetching = BlendRetriever(plain, disk_llm.engine, limit=2)

    def shown(retriever: Any) -> list[tuple[str, float | None]]:
        found = retriever.retrieve(QUESTION) if form == "sync" else asyncio.run(retriever.aretrieve(QUESTION))
        return [(each.node_id, each.score) for each in found]

    assert shown(fetching) == shown(plain)
    names = [name for name, _ in shown(plain)]
    assert disk_llm.engine.prefetch(names[:2]).wait(60)
    one_chunk = disk_llm.engine.store.stats().ram_bytes / 2
    # Only two of the four: the third costs as much again, more or less.
    assert disk_llm.engine.prefetch(names).wait(60)
    assert disk_llm.engine.store.stats().ram_bytes > 2.5 * one_chunk
    # What it does not know is the other's.
    assert fetching.retriever is plain and fetching.similarity_top_k == 4
    with pytest.raises(AttributeError):
        fetching.no_such_thing  # noqa: B018
    with pytest.raises(ConfigError, match="limit"):
        BlendRetriever(plain, disk_llm, limit=0)
