"""Each node is read behind others of its document, and of no other, wherever it comes from; and goes with its document."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import chromadb
import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import (
    HierarchicalNodeParser,
    SentenceSplitter,
    SentenceWindowNodeParser,
    get_leaf_nodes,
)
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import BaseNode, ImageNode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore, VectorStoreQuery
from llama_index.vector_stores.chroma import ChromaVectorStore

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from cacheblend_rag.errors import ConfigError
from integrations.llama_index.tests.conftest import FACTS, MakeLLM, WordEmbedding
from llama_index_cacheblend import BlendLLM, BlendSynthesizer, BlendVectorStore, warm_index
from llama_index_cacheblend.nodes import Boundary, node_chunks, placed
from tests.engines import documents_of

NAMES = ["Mara", "Otto", "Lena"]
SPLITTER = SentenceSplitter(chunk_size=60, chunk_overlap=20)
SOURCE = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="d")}

MakeEngine = Callable[..., BlendEngine]


def text_of(name: str, lines: int = 16) -> str:
    return " ".join(f"{name} was at work on day {number} of the year." for number in range(lines))


def some_documents() -> list[Document]:
    return [Document(text=text_of(name), id_=f"d{n}") for n, name in enumerate(NAMES)]


@pytest.fixture
def make_engine(model: Any, tokenizer: Any, tmp_path: Path) -> Iterator[MakeEngine]:
    engines: list[BlendEngine] = []

    def make(**settings: Any) -> BlendEngine:
        settings = engine_settings(**{"self_check": False, "separator": "\n\n"} | settings)
        # The keys of what is in RAM alone differ from engine to engine.
        engines.append(BlendEngine(model, tokenizer, store=tmp_path / str(len(engines)), **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


# Where a node stands.


@pytest.mark.parametrize(
    ("node", "place"),
    [
        (
            TextNode(text="\n  Otto. ", start_char_idx=7, metadata={"by": "Ada"}, relationships=SOURCE),
            ("d", 10, "Otto."),
        ),
        (
            TextNode(text="Otto.", start_char_idx=0, text_template="{content}\n{metadata_str}", relationships=SOURCE),
            ("d", 0, "Otto."),
        ),
        (TextNode(text="Otto.", relationships=SOURCE), ("d", None, None)),
        (TextNode(text="Otto.", start_char_idx=3), (None, None, None)),
        (Document(text="Otto."), (None, None, None)),
        # Its own text is not in what is shown of it.
        (ImageNode(id_="n", text="", metadata={"by": "Ada"}, relationships=SOURCE), ('["d", null, "n"]', None, None)),
        (
            TextNode(id_="n", text="Otto.", metadata={"a": 1}, text_template="{metadata_str}", relationships=SOURCE),
            ('["d", null, "n"]', None, None),
        ),
    ],
)
def test_places(node: BaseNode, place: tuple[str | None, int | None, str | None]) -> None:
    [chunk] = node_chunks([node])
    chunk = placed(chunk, node, Boundary())
    assert (chunk.document, chunk.start, chunk.body and chunk.text[slice(*chunk.body)]) == place


def test_nobodys_id_names_the_document_of_another_reader() -> None:
    def named(name: str, **metadata: str) -> str | None:
        relationships = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=name)}
        return Boundary(["reader"]).document(TextNode(text="Otto.", metadata=metadata, relationships=relationships))

    names = [named("d", reader="ada"), named('d", null, "ada'), named("d"), named("d", reader="null")]
    assert len(set(names)) == len(names)


# Ways in.


@pytest.mark.parametrize("way", ["batches", "background", "shuffled", "workers", "warm"])
def test_ways_in(inner: Any, make_engine: MakeEngine, embedding: WordEmbedding, way: str) -> None:
    engine, documents = make_engine(), some_documents()
    store = BlendVectorStore(inner, engine=engine, background=way == "background")
    storage = StorageContext.from_defaults(vector_store=inner if way == "warm" else store)
    index = VectorStoreIndex([], storage_context=storage, embed_model=embedding)
    nodes: Sequence[BaseNode] = SPLITTER(documents)
    assert len(nodes) > 4 * len(NAMES)
    if way == "workers":
        pipeline = IngestionPipeline(transformations=[SPLITTER, embedding], vector_store=store)
        nodes = asyncio.run(pipeline.arun(documents=documents))
    else:
        random.Random(5).shuffle(nodes) if way == "shuffled" else None  # type: ignore[arg-type, func-returns-value]
        for start in range(0, len(nodes), 2):
            index.insert_nodes(list(nodes[start : start + 2]))
    if way == "warm":
        warm_index(index, engine=engine, nodes=nodes)
    engine.flush()
    of = {node.node_id: node.ref_doc_id for node in nodes}
    texts = {node.node_id: node.get_content() for node in nodes}
    for document in documents:
        read = [texts[id] for id in engine.document(document.id_)]
        assert read == [node.get_content() for node in SPLITTER([document])]
    records = [record for record in engine.records(list(of)) if record is not None]
    assert all(engine.store.holds(list(of))) and len(records) == len(of)
    seen = {record.id: record.later.seen for record in records if record.later}
    assert all(other != id and of[other] == of[id] for id, others in seen.items() for other, _ in others)
    # Of a document at most the first has come before any other.
    assert sum(not others for others in seen.values()) <= len(NAMES)


def test_levels_of_a_hierarchy(chroma: ChromaVectorStore, llm: BlendLLM, embedding: WordEmbedding) -> None:
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[160, 80, 40], chunk_overlap=0)
    nodes = parser.get_nodes_from_documents([Document(text=text_of("Mara", 30), id_="d0")])
    leaves = get_leaf_nodes(nodes)
    docstore = SimpleDocumentStore()
    docstore.add_documents(nodes)
    context = StorageContext.from_defaults(vector_store=BlendVectorStore(chroma, engine=llm.engine), docstore=docstore)
    index = VectorStoreIndex(leaves, storage_context=context, embed_model=embedding)
    assert warm_index(index, nodes=nodes).unchanged == len(leaves)
    roots = [node.node_id for node in nodes if node.parent_node is None]
    [document] = set(documents_of(llm.engine, roots))
    assert llm.engine.document(str(document)) == roots and len(roots) > 1
    readings = documents_of(llm.engine, [node.node_id for node in nodes])
    for node, reading in zip(nodes, readings, strict=True):
        ids = [each.node_id for each in nodes if each.parent_node == node.parent_node]
        assert reading is not None and llm.engine.document(reading) == ids
    merging = AutoMergingRetriever(index.as_retriever(similarity_top_k=20), context, simple_ratio_thresh=0.1)
    engine = RetrieverQueryEngine(merging, BlendSynthesizer(llm))
    response = engine.query("Mara")
    assert {each.node_id for each in response.source_nodes} <= {node.node_id for node in nodes} - {
        node.node_id for node in leaves
    }
    assert response.metadata["blend"]["misses"] == 0
    # Parents go with their document, too.
    index.delete_ref_doc("d0")
    llm.engine.delete(llm.engine.heads())
    assert (llm.engine.ids(), llm.engine.store.stats().entries) == ([], 0)


POSTPROCESSOR = MetadataReplacementPostProcessor(target_metadata_key="window")


@pytest.mark.parametrize("text_of", [None, POSTPROCESSOR, lambda node: node.metadata["window"]])
def test_windows(llm: BlendLLM, chroma: ChromaVectorStore, embedding: WordEmbedding, text_of: Any) -> None:
    store = BlendVectorStore(chroma, engine=llm.engine, text_of=text_of)
    nodes = SentenceWindowNodeParser.from_defaults(window_size=1)([Document(text=" ".join(FACTS), id_="d")])
    index = VectorStoreIndex(
        nodes, storage_context=StorageContext.from_defaults(vector_store=store), embed_model=embedding
    )
    # Sentences are read in order, and windows alone.
    assert llm.engine.document("d") == ([] if text_of else [node.node_id for node in nodes])
    engine = RetrieverQueryEngine(
        index.as_retriever(similarity_top_k=3), BlendSynthesizer(llm), node_postprocessors=[POSTPROCESSOR]
    )
    assert engine.query("Who?").metadata["blend"]["hits"] == (3 if text_of else 0)
    if not text_of:
        warm_index(index, text_of=POSTPROCESSOR)
        assert engine.query("Who?").metadata["blend"]["hits"] == 3
    llm.engine.flush()
    index.delete_ref_doc("d")
    llm.engine.delete(llm.engine.heads())
    assert (llm.engine.ids(), llm.engine.store.stats().ram_bytes) == ([], 0)


# Whose readers differ.


@pytest.mark.parametrize("boundary", [[], ["reader"]])
def test_no_traces_are_left_across_a_boundary(make_engine: MakeEngine, boundary: list[str]) -> None:
    seen = []
    for secret in ("Mara sleeps.", "Mara dreams."):
        engine, nodes = make_engine(), SPLITTER([Document(text=text_of("Mara"), id_="d0")])
        for number, node in enumerate(nodes):
            node.metadata["reader"] = "all" if number % 2 else "few"
            node.embedding = [1.0]
            if number % 2 == 0:
                node.set_content(secret)  # type: ignore[attr-defined]
        BlendVectorStore(SimpleVectorStore(), engine=engine, boundary=boundary).add(nodes)
        records = engine.records([node.node_id for node in nodes[1::2]])
        seen.append([record.keys for record in records if record is not None])
        assert len(seen[-1]) == len(nodes) // 2
    assert (seen[0] == seen[1]) == bool(boundary)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_filters_that_divide_no_document_are_warned_of(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    async def warnings(store: BlendVectorStore, *names: str) -> int:
        caplog.clear()
        inside = MetadataFilters(filters=[MetadataFilter(key=name, value="x") for name in names])
        query = VectorStoreQuery(query_embedding=[1.0], similarity_top_k=1, filters=MetadataFilters(filters=[inside]))
        await store.aquery(query) if asynchronous else store.query(query)
        return sum(each.levelno == logging.WARNING for each in caplog.records)

    store = BlendVectorStore(SimpleVectorStore(), engine=make_engine(), boundary=["reader"])
    assert await warnings(store, "reader", "ref_doc_id", "document_id") == 0
    assert await warnings(store, "reader", "page") == 1
    assert await warnings(store, "page", "year") == 1
    alone = BlendVectorStore(SimpleVectorStore(), engine=make_engine(companions="neutral"))
    assert await warnings(alone, "page") == 0
    # Nodes are read behind whatever is like them.
    with pytest.raises(ConfigError, match="similar"):
        BlendVectorStore(SimpleVectorStore(), engine=make_engine(companions="similar"), boundary=["reader"])


# What others do.


def wrapped(llm: BlendLLM, folder: Path, name: str = "nodes") -> BlendVectorStore:
    client = chromadb.PersistentClient(str(folder / "chroma"))
    return BlendVectorStore(
        ChromaVectorStore(chroma_collection=client.get_or_create_collection(name)), engine=llm.engine
    )


def facts(embedding: WordEmbedding, names: str) -> list[TextNode]:
    return [
        TextNode(id_=f"{names}{number}", text=text, embedding=embedding.get_text_embedding(text), relationships=SOURCE)
        for number, text in enumerate(FACTS)
    ]


def test_what_others_have_or_deleted(make_llm: MakeLLM, tmp_path: Path, embedding: WordEmbedding) -> None:
    llm = make_llm(store=tmp_path / "kv")
    store, other = wrapped(llm, tmp_path, "one"), wrapped(llm, tmp_path, "other")
    store.add(facts(embedding, "a"))
    other.add(facts(embedding, "b"))
    store.inner.delete_nodes(["a1", "a3"])
    assert store.sync() == 2
    store.inner.delete_nodes(["a2"])
    store.add(facts(embedding, "c")[:1])
    others = {f"b{number}" for number in range(5)}
    assert set(llm.engine.ids()) == {"a0", "a4", "c0", *others}
    # Nodes above others are in a docstore, and go with their document.
    below = {NodeRelationship.CHILD: [RelatedNodeInfo(node_id="c0")]}
    store.encoder.encode([TextNode(id_="parent", text="Of all of it.", relationships=SOURCE | below)])
    assert store.sync() == 0
    store.delete("d")
    assert set(llm.engine.ids()) == others
    other.delete("d")
    assert llm.engine.ids() == []
