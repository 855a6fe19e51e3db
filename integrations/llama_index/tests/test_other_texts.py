"""An index whose text, as the model is shown it, is not the one that was stored."""

import logging
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.node_parser import SentenceWindowNodeParser
from llama_index.core.postprocessor import MetadataReplacementPostProcessor, SimilarityPostprocessor
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters, SimpleVectorStore

from cacheblend_rag.errors import ConfigError
from integrations.llama_index.tests.conftest import FACTS, WordEmbedding
from llama_index_cacheblend import BlendLLM, BlendSynthesizer, BlendVectorStore, warm_index
from llama_index_cacheblend.nodes import Boundary

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
def test_it_is_said_once_and_the_line_that_is_said_mends_it(
    llm: BlendLLM, embedding: WordEmbedding, caplog: pytest.LogCaptureFixture, window_alone: bool
) -> None:
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


def test_windows_are_stored_as_their_postprocessor_shows_them(
    llm: BlendLLM, embedding: WordEmbedding, caplog: pytest.LogCaptureFixture
) -> None:
    store = BlendVectorStore(SimpleVectorStore(stores_text=True), engine=llm.engine, text_of=POSTPROCESSOR)
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


def test_a_filter_is_warned_of_once_by_several_threads(caplog: pytest.LogCaptureFixture) -> None:
    filters = MetadataFilters(filters=[MetadataFilter(key=f"k{n}", value="x") for n in range(200)])
    boundary = Boundary()
    with caplog.at_level(logging.WARNING, logger="llama_index_cacheblend"), ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: boundary.watch(filters), range(8)))
    assert len(caplog.records) == 200
