"""Warming an index that is there already: nothing is embedded, everything is encoded, and once is enough."""

from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, Settings, StorageContext, SummaryIndex, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index.vector_stores.chroma import ChromaVectorStore
from transformers import LlamaForCausalLM

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from cacheblend_rag.engine import WarmEstimate
from cacheblend_rag.errors import ConfigError, StoreError
from integrations.llama_index.tests.conftest import FACTS, WordEmbedding
from llama_index_cacheblend import BlendLLM, BlendSynthesizer, BlendVectorStore, estimate, warm_index


class Unwilling(WordEmbedding):
    """Embeds questions, and nothing else any more."""

    def _get_text_embedding(self, text: str) -> list[float]:
        raise AssertionError(f"embedded again: {text}")

    def _get_query_embedding(self, query: str) -> list[float]:
        return WordEmbedding._get_text_embedding(self, query)


@pytest.fixture
def index(inner: BasePydanticVectorStore, embedding: WordEmbedding) -> VectorStoreIndex:
    """An index that somebody made without us."""
    index = VectorStoreIndex.from_documents(
        [Document(text=text, id_=f"d{number}", metadata={"by": "Ada"}) for number, text in enumerate(FACTS)],
        storage_context=StorageContext.from_defaults(vector_store=inner),
        embed_model=embedding,
    )
    index._embed_model = Unwilling(model_name="unwilling")
    return index


def report_of(index: VectorStoreIndex, llm: BlendLLM) -> dict[str, Any]:
    nodes = index.as_retriever(similarity_top_k=9).retrieve("Mara?")
    report: dict[str, Any] = BlendSynthesizer(llm=llm).synthesize("Mara?", nodes).metadata["blend"]
    return report


@pytest.mark.parametrize("background", [False, True])
def test_every_node_hits_afterwards(index: VectorStoreIndex, llm: BlendLLM, background: bool) -> None:
    seen: list[tuple[int, int]] = []

    def note(finished: int, total: int) -> None:
        seen.append((finished, total))

    if background:
        job = warm_index(index, engine=llm.engine, background=True)
        result = job.result()
        assert job.done()
        assert job.progress == (5, 5)
    else:
        result = warm_index(index, engine=llm.engine, progress=note)
        assert seen[-1] == (5, 5)
        assert seen == sorted(seen)
    assert (result.nodes, result.encoded, result.unchanged) == (5, 5, 0)
    assert result.tokens > 0
    report = report_of(index, llm)
    assert (report["hits"], report["misses"]) == (5, 0)
    again = warm_index(index, engine=llm.engine)
    assert (again.nodes, again.encoded, again.unchanged, again.tokens) == (5, 0, 5, 0)


def test_whose_engine(index: VectorStoreIndex, llm: BlendLLM, make_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "_llm", None)
    with pytest.raises(ConfigError, match=r"engine=llm\.engine"):
        warm_index(index)
    monkeypatch.setattr(Settings, "_llm", make_llm())
    assert warm_index(index).encoded == 5
    index._vector_store = BlendVectorStore(index.vector_store, engine=llm.engine)
    assert warm_index(index).encoded == 5
    assert len(llm.engine.ids()) == 5
    assert warm_index(index, engine=llm).unchanged == 5
    with pytest.raises(ConfigError, match=r"engine='reference' is a str.*engine=llm\.engine"):
        warm_index(index, engine="reference")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="positional"):
        warm_index(index, llm.engine)  # type: ignore[call-overload]


def test_an_unreadable_text_is_said(index: VectorStoreIndex, llm: BlendLLM, caplog: pytest.LogCaptureFixture) -> None:
    warm_index(index, engine=llm)

    def window(node: Any) -> Any:
        content = node.get_content()
        return {}["window"] if "Mara" in content else 3 if "Otto" in content else content

    result = warm_index(index, engine=llm, text_of=window)
    reasons = sorted(result.failed.values(), key=lambda reason: "KeyError" not in reason)
    assert (len(reasons), result.encoded, result.without_text) == (2, 3, ())
    assert "cannot be read: window raised KeyError('window')" in reasons[0]
    assert "must be a text or None, and window returned an object of type int" in reasons[1]
    assert "2 of 5 nodes are stored without KV" in caplog.text
    # What their ids stood for before is gone.
    assert not set(result.failed) & set(llm.engine.ids())
    assert len(llm.engine.ids()) == 3


def test_the_text_is_that_of_the_caller_or_of_the_store(index: VectorStoreIndex, llm: BlendLLM) -> None:
    def loud(node: Any) -> str:
        return str(node.get_content()).upper()

    index._vector_store = BlendVectorStore(index.vector_store, engine=llm.engine, text_of=loud)
    assert warm_index(index).encoded == 5
    assert warm_index(index, text_of=loud).unchanged == 5
    assert warm_index(index, text_of=lambda node: node.get_content()).encoded == 5
    result = warm_index(index, text_of=lambda node: "" if "Mara" in node.get_content() else "It.")
    assert len(result.without_text) == 1
    # Four nodes of one text.
    assert (result.nodes, result.encoded, result.named, result.unchanged) == (5, 1, 4, 0)
    assert len(llm.engine.ids()) == 4


def test_no_room_is_said(index: VectorStoreIndex, model: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with BlendEngine(model, tokenizer, **engine_settings(ram_bytes=1, self_check=False)) as engine:
        result = warm_index(index, engine=engine)
        assert len(result.failed) == 5
        assert "of 5 nodes was not stored" in caplog.text
        with pytest.raises(StoreError):
            warm_index(index, engine=engine, background=True).result(timeout_s=60)
        with pytest.raises(StoreError):
            engine.flush()


def test_what_is_gone_is_pruned_on_request(index: VectorStoreIndex, llm: BlendLLM) -> None:
    warm_index(index, engine=llm.engine)
    index.delete_ref_doc("d0", delete_from_docstore=True)
    # Deleted behind our back: nobody told the engine.
    assert len(llm.engine.ids()) == 5
    assert warm_index(index, engine=llm.engine).nodes == 4
    assert len(llm.engine.ids()) == 5
    assert warm_index(index, engine=llm.engine, prune=True).pruned == 1
    assert len(llm.engine.ids()) == 4
    assert llm.engine._store.stats().entries == 2 * 4
    with pytest.raises(ConfigError, match="only a part"):
        warm_index(index, engine=llm.engine, prune=True, nodes=[])


def test_nodes_can_be_handed_over(index: VectorStoreIndex, llm: BlendLLM) -> None:
    nodes = [each.node for each in index.as_retriever(similarity_top_k=2).retrieve("Mara?")]
    assert warm_index(index, engine=llm.engine, nodes=nodes).encoded == 2
    assert set(llm.engine.ids()) == {node.node_id for node in nodes}


def test_other_indices_have_their_nodes_in_the_docstore(llm: BlendLLM) -> None:
    index = SummaryIndex([TextNode(text=text, id_=f"n{number}") for number, text in enumerate(FACTS)])
    assert warm_index(index, engine=llm.engine).encoded == 5
    nodes = index.as_retriever().retrieve("Mara?")
    assert BlendSynthesizer(llm=llm).synthesize("Mara?", nodes).metadata["blend"]["hits"] == 5


def test_a_bar_shows_it(index: VectorStoreIndex, llm: BlendLLM, capsys: pytest.CaptureFixture[str]) -> None:
    warm_index(index, engine=llm.engine, show_progress=True)
    assert "Encoding nodes: 100%" in capsys.readouterr().err


@pytest.mark.parametrize("codec", ["native", "int8"])
def test_an_estimate_says_what_an_ingestion_takes(
    model: LlamaForCausalLM, tokenizer: Any, chroma: ChromaVectorStore, tmp_path: Path, codec: str
) -> None:
    documents = [Document(text=" ".join(FACTS[: size + 1]) * (2 + 3 * size), id_=f"d{size}") for size in range(5)]
    splitter = SentenceSplitter(chunk_size=64, chunk_overlap=0)
    settings = engine_settings(self_check=False, disk_codec=codec)
    with (
        pytest.MonkeyPatch.context() as patch,
        BlendEngine(model, tokenizer, store=tmp_path / "kv", **settings) as engine,
    ):
        patch.setattr(Settings, "_transformations", [splitter])
        store = BlendVectorStore(chroma, engine=engine)
        before = estimate(store, documents)
        assert estimate(store, splitter(documents)).tokens == before.tokens
        assert (engine.ids(), engine.store.stats().entries) == ([], 0)
        assert estimate(store).chunks == 0
        index = VectorStoreIndex.from_documents(
            documents, StorageContext.from_defaults(vector_store=store), embed_model=WordEmbedding()
        )
        held = engine.store.stats()
        assert before.chunks == len({record.key for record in engine.records(engine.ids()) if record is not None}) > 15
        assert before.disk_bytes == pytest.approx(held.disk_bytes, rel=0.1)
        assert before.ram_bytes == pytest.approx(held.ram_bytes, rel=0.01)
        assert before.seconds > 0
        assert estimate(index) == WarmEstimate(0, 0)
        # Beside those that are there, some new nodes of the same texts would be read behind others.
        assert estimate(store, documents).tokens < before.tokens / 2
        # As without a store: an index that is there, and nothing of it is encoded.
        engine.delete(engine.ids())
        assert estimate(index).disk_bytes == pytest.approx(held.disk_bytes, rel=0.1)
        bare = VectorStoreIndex.from_vector_store(chroma, embed_model=WordEmbedding())
        assert estimate(bare, engine=engine).tokens == before.tokens


def test_documents_are_no_index(llm: BlendLLM) -> None:
    documents: Any = [Document(text="A text.")]
    with pytest.raises(ConfigError, match="a list was given for the index"):
        estimate(documents, engine=llm.engine)
    with pytest.raises(ConfigError, match="a list was given for the index"):
        warm_index(documents, engine=llm.engine)


def test_an_estimate_needs_nodes_to_look_at(llm: BlendLLM) -> None:
    store = BlendVectorStore(SimpleVectorStore(), engine=llm.engine)
    with pytest.raises(ConfigError, match="give the index, or the nodes"):
        estimate(store)
    too_long = TextNode(text="word " * 3000, id_="long")
    assert estimate(store, [TextNode(text=" "), too_long, TextNode(text="A text.")]).chunks == 1
