"""Whatever way nodes come in, each is read behind others of its document, and of no other."""

import logging
import random
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import (
    HierarchicalNodeParser,
    MarkdownNodeParser,
    SentenceSplitter,
    SentenceWindowNodeParser,
    get_leaf_nodes,
)
from llama_index.core.postprocessor import MetadataReplacementPostProcessor, SimilarityPostprocessor
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore, VectorStoreQuery
from llama_index.vector_stores.chroma import ChromaVectorStore

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, EngineConfig
from cacheblend_rag.errors import ConfigError
from integrations.llama_index.tests.conftest import FACTS, WordEmbedding
from llama_index_cacheblend import BlendLLM, BlendSynthesizer, BlendVectorStore, warm_index

NAMES = ["Mara", "Otto", "Lena", "Ada", "Ivo"]
SPLITTER = SentenceSplitter(chunk_size=60, chunk_overlap=20)

MakeEngine = Callable[..., BlendEngine]
Parse = Callable[[Sequence[BaseNode]], Sequence[BaseNode]]


def text_of(name: str, lines: int = 16) -> str:
    return " ".join(f"{name} was at work on day {number} of the year." for number in range(lines))


def some_documents(**changed: str) -> list[Document]:
    """Documents d0 to d4; what is said of one can be changed."""
    return [Document(text=changed.get(f"d{n}", text_of(name)), id_=f"d{n}") for n, name in enumerate(NAMES)]


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


def index_over(store: BlendVectorStore, nodes: Sequence[BaseNode], embedding: WordEmbedding) -> VectorStoreIndex:
    context = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex(
        list(nodes), storage_context=context, embed_model=embedding, transformations=[SPLITTER], insert_batch_size=2
    )


def keys(engine: BlendEngine, nodes: Sequence[BaseNode]) -> list[tuple[str, ...]]:
    """The store keys, digests of a text and of what it is read behind, of nodes that are known and have their KV."""
    found = [record.keys for record in engine.records([node.node_id for node in nodes]) if record is not None]
    assert len(found) == len(nodes)
    assert all(engine._store.holds([key for each in found for key in each]))
    return found


def read_by_document(
    engine: BlendEngine, nodes: Sequence[BaseNode], documents: Sequence[Document], parser: Parse = SPLITTER
) -> int:
    """Assert that documents are read in the parser's order, and nodes behind such of theirs; return how many have met none."""
    texts = {node.node_id: node.get_content() for node in nodes}
    of = {node.node_id: node.ref_doc_id for node in nodes}
    for document in documents:
        read = [texts[id] for id in engine.document(document.id_)]
        assert read == [node.get_content() for node in parser([document])] and len(read) > 1
    assert len(keys(engine, nodes)) == sum(len(engine.document(document.id_)) for document in documents)
    seen = {record.id: record.later.seen for record in engine.records(list(of)) if record is not None and record.later}
    assert len(seen) == len(nodes)
    assert all(other != id and of[other] == of[id] for id, others in seen.items() for other, _ in others)
    return sum(not others for others in seen.values())


def nodes_in(index: VectorStoreIndex) -> list[BaseNode]:
    return [each.node for each in index.as_retriever(similarity_top_k=999).retrieve("Who?")]


@pytest.mark.parametrize("background", [False, True])
def test_batches(inner: Any, make_engine: MakeEngine, embedding: WordEmbedding, background: bool) -> None:
    engine = make_engine()
    store = BlendVectorStore(inner, engine=engine, background=background)
    nodes = SPLITTER(some_documents())
    assert len(nodes) >= 5 * len(NAMES)
    index_over(store, nodes, embedding)
    engine.flush()
    # Of a document at most the first has come before any other.
    assert read_by_document(engine, nodes, some_documents()) <= len(NAMES)
    assert engine.document("none") == []


def test_nodes_in_any_order(inner: Any, make_engine: MakeEngine, embedding: WordEmbedding) -> None:
    documents = some_documents()[:2]
    engine = make_engine()
    store = BlendVectorStore(inner, engine=engine)
    index = index_over(store, [], embedding)
    nodes = SPLITTER(documents)
    shuffled = random.Random(5).sample(nodes, len(nodes))
    for node in shuffled:
        index.insert_nodes([node])
    assert read_by_document(engine, nodes, documents) <= len(documents)


# Forks of asynchronous pipelines: from Python 3.12 on they are warned of in a process with threads, which is LlamaIndex's choice.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_pipelines_with_workers(chroma: ChromaVectorStore, make_engine: MakeEngine, asynchronous: bool) -> None:
    engine = make_engine()
    store = BlendVectorStore(chroma, engine=engine)
    # Neither needs what a process of its own would have to fetch.
    parser, embedding = MarkdownNodeParser(), MockEmbedding(embed_dim=64)
    pipeline = IngestionPipeline(
        transformations=[parser, embedding],
        vector_store=store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    index = VectorStoreIndex.from_vector_store(store, embed_model=embedding)
    texts = {f"d{n}": "\n\n".join(f"# Day {day}\n\n{name} worked." for day in range(6)) for n, name in enumerate(NAMES)}
    changed = {name: text if name != "d3" else f"# Day none\n\n{text}" for name, text in texts.items() if name != "d0"}
    for now in (texts, changed):
        documents = [Document(text=text, id_=name) for name, text in now.items()]
        if asynchronous:
            await pipeline.arun(documents=documents, num_workers=2)
        else:
            pipeline.run(documents=documents, num_workers=2)
        nodes = nodes_in(index)
        read_by_document(engine, nodes, documents, parser)
        assert engine._store.stats().entries == len({key for each in keys(engine, nodes) for key in each})


def test_warming(
    inner: Any, make_engine: MakeEngine, embedding: WordEmbedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llama_index_cacheblend.warm as warm

    # Fewer than a document has.
    monkeypatch.setattr(warm, "_BATCH", 3)
    index = VectorStoreIndex.from_documents(
        some_documents(),
        storage_context=StorageContext.from_defaults(vector_store=inner),
        embed_model=embedding,
        transformations=[SPLITTER],
    )
    engine, seen = make_engine(), []
    result = warm_index(index, engine=engine, progress=lambda finished, total: seen.append((finished, total)))
    read_by_document(engine, nodes_in(index), some_documents())
    assert seen == sorted(seen) and seen[-1] == (result.nodes, result.nodes)
    assert warm_index(index, engine=engine).unchanged == result.encoded == result.nodes


@pytest.mark.parametrize("how", ["add", "add later", "warm"])
def test_levels_of_a_hierarchy(chroma: ChromaVectorStore, llm: BlendLLM, embedding: WordEmbedding, how: str) -> None:
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[160, 80, 40], chunk_overlap=0)
    nodes = parser.get_nodes_from_documents([Document(text=text_of("Mara", 30), id_="d0")])
    leaves = get_leaf_nodes(nodes)
    docstore = SimpleDocumentStore()
    docstore.add_documents(nodes)
    parents = None if how == "warm" else docstore
    store = BlendVectorStore(chroma, engine=llm.engine, parents=parents)
    context = StorageContext.from_defaults(vector_store=store, docstore=docstore)
    at_first = leaves[:3] if how == "add later" else leaves
    index = VectorStoreIndex(at_first, storage_context=context, embed_model=embedding)
    index.insert_nodes(leaves[len(at_first) :])
    if how == "warm":
        assert warm_index(index, nodes=nodes).unchanged == len(leaves)
    else:
        result = warm_index(index, prune=True)
        assert (result.nodes, result.unchanged, result.pruned) == (len(nodes), len(nodes), 0)
    roots = [node.node_id for node in nodes if node.parent_node is None]
    assert llm.engine.document("d0") == roots and len(roots) > 1
    readings = llm.engine.places([node.node_id for node in nodes])
    for node, reading in zip(nodes, readings, strict=True):
        ids = [each.node_id for each in nodes if each.parent_node == node.parent_node]
        assert reading is not None and llm.engine.document(reading) == ids
    merging = AutoMergingRetriever(index.as_retriever(similarity_top_k=20), context, simple_ratio_thresh=0.1)
    found = merging.retrieve("Mara")
    assert {each.node_id for each in found} <= {node.node_id for node in nodes} - {node.node_id for node in leaves}
    report = BlendSynthesizer(llm=llm).synthesize("Mara?", found).metadata["blend"]
    assert (report["hits"], report["misses"]) == (len(found), 0)
    index.delete_ref_doc("d0")
    # What is left is the template's own words before the nodes.
    assert llm.engine.ids() == [] and llm.engine._store.stats().entries == len(llm.engine.heads())


def test_parents_that_the_docstore_lacks_are_said(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    nodes = HierarchicalNodeParser.from_defaults(chunk_sizes=[160, 40])([Document(text=text_of("Mara"), id_="d0")])
    leaves = get_leaf_nodes(nodes)
    for node in leaves:
        node.embedding = [1.0]
    engine = make_engine()
    BlendVectorStore(SimpleVectorStore(), engine=engine, parents=SimpleDocumentStore()).add(leaves)
    assert sorted(engine.ids()) == sorted(node.node_id for node in leaves)
    assert "add all nodes to the docstore before their leaves" in caplog.text


def test_sentences_are_read_in_order_and_windows_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    nodes = SentenceWindowNodeParser(window_size=1)([Document(text=text_of("Mara"), id_="d0")])
    for node in nodes:
        node.embedding = [1.0]
    BlendVectorStore(SimpleVectorStore(), engine=engine).add(nodes)
    assert engine.document("d0") == [node.node_id for node in nodes]
    BlendVectorStore(SimpleVectorStore(), engine=engine, text_of=lambda node: node.metadata["window"]).add(nodes)
    assert engine.document("d0") == [] and len(engine.ids()) == len(nodes)
    # Where it is the text itself that is shown, it has its place.
    BlendVectorStore(SimpleVectorStore(), engine=engine, text_of=lambda node: node.get_content()).add(nodes)
    assert engine.document("d0") == [node.node_id for node in nodes]


# Whose readers differ.


def two_readers(secret: str) -> list[BaseNode]:
    """A document of which every other node is not for everybody."""
    nodes = SPLITTER([Document(text=text_of("Mara"), id_="d0")])
    for number, node in enumerate(nodes):
        node.metadata["reader"] = "all" if number % 2 else "few"
        node.embedding = [1.0]
        if number % 2 == 0:
            node.set_content(secret)  # type: ignore[attr-defined]
    return nodes


@pytest.mark.parametrize("options", [{}, {"boundary": ["reader"]}])
def test_no_traces_are_left_across_a_boundary(make_engine: MakeEngine, options: dict[str, Any]) -> None:
    seen = []
    for secret in ("Mara sleeps.", "Mara dreams."):
        engine, nodes = make_engine(), two_readers(secret)
        BlendVectorStore(SimpleVectorStore(), engine=engine, **options).add(nodes)
        open_to_all = [node for node in nodes if node.metadata["reader"] == "all"]
        seen.append(keys(engine, open_to_all))
        behind = [place for place in engine.places([node.node_id for node in open_to_all]) if place is not None]
        assert len(behind) == len(open_to_all)
    assert (seen[0] == seen[1]) == bool(options)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_other_filters(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, asynchronous: bool) -> None:
    async def asked(store: BlendVectorStore, *names: str) -> list[str]:
        caplog.clear()
        for filters in (MetadataFilters(filters=[MetadataFilter(key=name, value="x") for name in names]), None):
            query = VectorStoreQuery(query_embedding=[1.0], similarity_top_k=1, filters=filters)
            await store.aquery(query) if asynchronous else store.query(query)
        return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]

    engine = make_engine()
    store = BlendVectorStore(SimpleVectorStore(), engine=engine, boundary=["reader"])
    store.add(two_readers("Mara sleeps."))
    assert await asked(store, "reader", "ref_doc_id", "document_id") == []
    [first] = await asked(store, "reader", "page")
    assert "filtered by 'page'" in first and "boundary=['page']" in first and "companions='neutral'" in first
    assert len(await asked(store, "page", "year")) == 1
    other = BlendVectorStore(SimpleVectorStore(), engine=make_engine(companions="neutral"))
    assert await asked(other, "page") == []


def test_options_that_mean_nothing(make_engine: MakeEngine) -> None:
    for boundary in ("reader", [""], [3]):
        with pytest.raises(ConfigError, match="boundary="):
            BlendVectorStore(SimpleVectorStore(), engine=make_engine(), boundary=boundary)  # type: ignore[arg-type]
    # Nodes are read behind whatever is like them.
    with pytest.raises(ConfigError, match="similar"):
        BlendVectorStore(SimpleVectorStore(), engine=make_engine(companions="similar"), boundary=["reader"])


# What stands between chunks.


def test_the_models_engine_joins_chunks_as_prompts(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def separator(config: EngineConfig | None = None) -> str:
        llm = BlendLLM(model, tokenizer=tokenizer, config=config)
        llm.engine.close()
        return llm.engine.config.separator

    assert separator() == separator(EngineConfig(ttl_s=60)) == "\n\n"
    assert [separator(EngineConfig(separator=given)) for given in ("", "\n")] == ["", "\n"]
    monkeypatch.setenv("CACHEBLEND_SEPARATOR", " | ")
    assert separator() == " | "


POSTPROCESSOR = MetadataReplacementPostProcessor(target_metadata_key="window")


def make_index(store: BlendVectorStore, embedding: WordEmbedding) -> VectorStoreIndex:
    parser = SentenceWindowNodeParser.from_defaults(
        window_size=1, window_metadata_key="window", original_text_metadata_key="original_text"
    )
    nodes = parser.get_nodes_from_documents([Document(text=" ".join(FACTS), metadata={"title": "People"})])
    return VectorStoreIndex(
        nodes, storage_context=StorageContext.from_defaults(vector_store=store), embed_model=embedding
    )


def ask(llm: BlendLLM, index: VectorStoreIndex) -> dict[str, object]:
    engine = index.as_query_engine(
        llm=llm, response_synthesizer=BlendSynthesizer(llm=llm), node_postprocessors=[POSTPROCESSOR], similarity_top_k=3
    )
    report: dict[str, object] = engine.query("Who runs the harbour office?").metadata["blend"]
    return report


@pytest.mark.parametrize("window_alone", [False, True], ids=["node's own text", "window without metadata"])
def test_mending(llm: BlendLLM, embedding: WordEmbedding, caplog: pytest.LogCaptureFixture, window_alone: bool) -> None:
    def window(node: BaseNode) -> str:
        return str(node.metadata["window"])

    text_of = window if window_alone else None
    inner = SimpleVectorStore(stores_text=True)
    store = BlendVectorStore(inner, engine=llm.engine, text_of=text_of)
    index = make_index(store, embedding)
    with caplog.at_level(logging.WARNING, logger="llama_index_cacheblend"):
        first = ask(llm, index)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: ask(llm, index), range(4)))
    assert (first["hits"], first["misses"]) == (0, 3)
    assert llm.engine.metrics.registry.get_sample_value("cacheblend_other_texts_total") == 3
    [record] = [record for record in caplog.records if "another text of node" in record.message]
    line = re.search(r"text_of=(.*)\) \(this", record.message)
    assert line is not None
    mended = eval(line[1], {"postprocessor": POSTPROCESSOR})
    caplog.clear()
    nodes = list(index.docstore.docs.values())
    warm_index(index, engine=llm.engine, text_of=mended, **({"nodes": nodes} if nodes else {}))
    again = ask(llm, index)
    assert (again["hits"], again["misses"]) == (3, 0)
    assert not caplog.records


@pytest.mark.parametrize("text_of", [POSTPROCESSOR, lambda node: f"title: People\n\n{node.metadata['window']}"])
def test_windows_shown(llm: BlendLLM, embedding: WordEmbedding, caplog: pytest.LogCaptureFixture, text_of: Any) -> None:
    store = BlendVectorStore(SimpleVectorStore(stores_text=True), engine=llm.engine, text_of=text_of)
    index = make_index(store, embedding)
    report = ask(llm, index)
    assert (report["hits"], report["misses"]) == (3, 0) and not caplog.records
    # Not even in memory is a node changed by that.
    assert all(node.get_content() != node.metadata["window"] for node in index.docstore.docs.values())


def test_what_shows_no_text_of_a_node_is_said(llm: BlendLLM, caplog: pytest.LogCaptureFixture) -> None:
    inner = SimpleVectorStore()
    with pytest.raises(ConfigError, match=r"text_of='window' must be a postprocessor, as MetadataReplacement"):
        BlendVectorStore(inner, engine=llm.engine, text_of="window")  # type: ignore[arg-type]
    store = BlendVectorStore(inner, engine=llm.engine, text_of=SimilarityPostprocessor(similarity_cutoff=0.5))
    store.add([TextNode(text=FACTS[0], id_="n0", embedding=[1.0])])
    assert "SimilarityPostprocessor raised ConfigError" in caplog.text and llm.engine.ids() == []
