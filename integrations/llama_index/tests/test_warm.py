"""Warming an index that is there already: nothing is embedded, everything is encoded, and once is enough."""

from typing import Any

import pytest
from llama_index.core import Document, Settings, StorageContext, SummaryIndex, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index.vector_stores.chroma import ChromaVectorStore

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
def bare(inner: BasePydanticVectorStore, embedding: WordEmbedding) -> VectorStoreIndex:
    """An index that somebody made without us."""
    index = VectorStoreIndex.from_documents(
        [Document(text=text, id_=f"d{number}", metadata={"by": "Ada"}) for number, text in enumerate(FACTS)],
        storage_context=StorageContext.from_defaults(vector_store=inner),
        embed_model=embedding,
    )
    index._embed_model = Unwilling(model_name="unwilling")
    return index


@pytest.mark.parametrize("background", [False, True])
def test_every_node_hits_afterwards(
    bare: VectorStoreIndex,
    llm: BlendLLM,
    background: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if background:
        job = warm_index(bare, engine=llm.engine, background=True)
        done = job.result()
        assert job.done() and job.progress == (5, 5)
        assert (done.encoded, done.unchanged) == (5, 0)
    else:
        # What takes no longer shows none.
        monkeypatch.setattr("cacheblend_rag.chat.engines._SHOWN_AFTER_S", 0.0)
        result = warm_index(bare, engine=llm.engine, show_progress=True)
        assert (result.encoded, result.unchanged) == (5, 0) and result.tokens > 0
        assert "100%" in capsys.readouterr().err
    nodes = bare.as_retriever(similarity_top_k=9).retrieve("Mara?")
    report = BlendSynthesizer(llm=llm).synthesize("Mara?", nodes).metadata["blend"]
    assert (report["hits"], report["misses"]) == (5, 0)
    again = warm_index(bare, engine=llm.engine)
    assert (again.encoded, again.unchanged, again.tokens) == (0, 5, 0)
    assert warm_index(bare, engine=llm.engine, nodes=[each.node for each in nodes[:2]]).unchanged == 2


def test_whose_engine_and_whose_text(
    bare: VectorStoreIndex, llm: BlendLLM, make_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loud(node: Any) -> str:
        return str(node.get_content()).upper()

    monkeypatch.setattr(Settings, "_llm", None)
    for options in ({}, {"engine": "reference"}):
        with pytest.raises(ConfigError, match="engine=llm"):
            warm_index(bare, **options)
    monkeypatch.setattr(Settings, "_llm", make_llm())
    assert warm_index(bare).encoded == 5
    bare._vector_store = BlendVectorStore(bare.vector_store, engine=llm.engine, text_of=loud)
    assert warm_index(bare).encoded == len(llm.engine.ids()) == 5
    assert warm_index(bare, engine=llm).unchanged == warm_index(bare, text_of=loud).unchanged == 5
    assert warm_index(bare, text_of=lambda node: node.get_content()).encoded == 5
    result = warm_index(bare, text_of=lambda node: "" if "Mara" in node.get_content() else "It.")
    # Four nodes of one text, and one without.
    assert (result.encoded, result.named, result.unchanged) == (1, 4, 0)
    assert len(llm.engine.ids()) == 4


def test_an_unreadable_text_is_said(bare: VectorStoreIndex, llm: BlendLLM, caplog: pytest.LogCaptureFixture) -> None:
    warm_index(bare, engine=llm)

    def window(node: Any) -> Any:
        content = node.get_content()
        return {"Mara": 3}[content[:4]] if content[:4] in ("Mara", "Otto") else content

    result = warm_index(bare, engine=llm, text_of=window)
    # What the ids of the others stood for before is gone.
    assert result.encoded == len(llm.engine.ids()) == 3 and len(caplog.records) == 2


def test_no_room_is_said(bare: VectorStoreIndex, model: Any, tokenizer: Any) -> None:
    with BlendEngine(model, tokenizer, **engine_settings(ram_bytes=1, self_check=False)) as engine:
        with pytest.raises(StoreError):
            warm_index(bare, engine=engine)
        with pytest.raises(StoreError):
            warm_index(bare, engine=engine, background=True).result(timeout_s=60)
        with pytest.raises(StoreError):
            engine.flush()


def test_other_indices_have_their_nodes_in_the_docstore(llm: BlendLLM) -> None:
    index = SummaryIndex([TextNode(text=text, id_=f"n{number}") for number, text in enumerate(FACTS)])
    assert warm_index(index, engine=llm.engine).encoded == 5
    nodes = index.as_retriever().retrieve("Mara?")
    assert BlendSynthesizer(llm=llm).synthesize("Mara?", nodes).metadata["blend"]["hits"] == 5
    store = BlendVectorStore(SimpleVectorStore(), engine=llm.engine)
    for source in (store, [Document(text="A text.")]):
        with pytest.raises(ConfigError):
            estimate(source, engine=llm.engine)  # type: ignore[arg-type]
    too_long = TextNode(text="word " * 3000, id_="long")
    assert estimate(store, [TextNode(text=" "), too_long, TextNode(text="A text.")]).chunks == 1


def test_an_estimate_says_what_an_ingestion_takes(
    llm: BlendLLM, chroma: ChromaVectorStore, embedding: WordEmbedding
) -> None:
    nodes = [TextNode(text=text) for text in FACTS]
    store = BlendVectorStore(chroma, engine=llm.engine)
    before = estimate(store, nodes)
    assert (before.chunks, llm.engine.ids(), estimate(store).chunks) == (len(FACTS), [], 0)
    context = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex(nodes, storage_context=context, embed_model=embedding)
    assert estimate(index) == WarmEstimate(0, 0)
    # As without a store: an index that is there, and nothing of it is encoded.
    llm.engine.delete(llm.engine.ids())
    bare = VectorStoreIndex.from_vector_store(chroma, embed_model=embedding)
    assert estimate(index).tokens == estimate(bare, engine=llm.engine).tokens == before.tokens
