"""Queries of LlamaIndex over one document, what deleting it does, and what stands between chunks."""

from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.vector_stores import SimpleVectorStore

import llama_index_cacheblend
from cacheblend_hybrid import HybridEngine
from cacheblend_lab.families import tiny_config, tiny_model
from cacheblend_lab.reference import load_tokenizer
from cacheblend_rag import BlendPrompt, Chunk, EngineConfig, FixedText
from cacheblend_rag.chunk import BLANK_LINE
from integrations.hybrid.tests.conftest import MakeHybrid, own_logits

pytestmark = pytest.mark.filterwarnings("ignore")

MANUAL = "Mara Lindell was born in Oslo. She works as a baker in the old town. Otto Brandt paints ships. " * 6
QUESTIONS = ("Where was Mara Lindell born?", "What does Otto paint?")


def wordy(make_hybrid: MakeHybrid, **options: Any) -> HybridEngine:
    """Return an engine that reads text."""
    sizes = {"vocab_size": len(load_tokenizer()), "max_position_embeddings": 2048, "eos_token_id": None}
    return make_hybrid(tiny_model(tiny_config("qwen3_next", **sizes)), load_tokenizer(), filled=False, **options)


def held(engine: HybridEngine, folder: Path) -> int:
    engine.flush()
    return len(list(folder.rglob("*.safetensors")))


def test_llama_index(make_hybrid: MakeHybrid, tmp_path: Path) -> None:
    engine = wordy(make_hybrid, store=tmp_path)
    llm = llama_index_cacheblend.BlendLLM(engine=engine, max_new_tokens=6)
    store = llama_index_cacheblend.BlendVectorStore(SimpleVectorStore(), engine=engine)
    storage, documents = StorageContext.from_defaults(vector_store=store), [Document(text=MANUAL, id_="manual")]
    index = VectorStoreIndex.from_documents(documents, storage_context=storage, embed_model=MockEmbedding(8))
    synthesizer = llama_index_cacheblend.BlendSynthesizer(llm)
    queries = index.as_query_engine(llm=llm, similarity_top_k=1, response_synthesizer=synthesizer)
    for hits, question in enumerate(QUESTIONS):
        report = queries.query(question).metadata["blend"]
        assert report["hits"] == hits
        assert report["recomputed_tokens"] == 0 or not hits
    assert held(engine, tmp_path) == 1
    index.delete_ref_doc("manual")
    assert held(engine, tmp_path) == 0


@pytest.mark.parametrize(("separator", "hits"), [("", 3), (BLANK_LINE, 3), (" and ", 1)])
def test_blanks_between_chunks(make_hybrid: MakeHybrid, separator: str, hits: int) -> None:
    engine = wordy(make_hybrid, config=EngineConfig(separator=separator.strip(" and")))
    engine.add([Chunk(MANUAL[start : start + 50], str(start), document="d", start=start) for start in (0, 50, 100)])
    prompt = BlendPrompt(FixedText("Read.\n"), ["0", "50", "100"], QUESTIONS[0], separator or "\n")
    assert engine.prefill(prompt).report.misses == 3
    found = engine.prefill(prompt)
    assert found.report.hits == hits
    assert (found.logits - own_logits(engine, prompt)).abs().max() < 1e-4 * found.logits.abs().max()
