"""Queries of LlamaIndex and LangChain over one document, and what deleting it does."""

from pathlib import Path
from typing import Any

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import Document as LlamaDocument
from llama_index.core import MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.vector_stores import SimpleVectorStore
from transformers import PreTrainedModel

import langchain_cacheblend
import llama_index_cacheblend
from cacheblend_lab.families import tiny_config, tiny_model
from cacheblend_lab.reference import load_tokenizer
from cacheblend_rag import BlendPrompt, Chunk, EngineConfig, FixedText
from cacheblend_rag.chunk import BLANK_LINE
from integrations.hybrid.tests.conftest import MakeHybrid, own_logits
from integrations.langchain.tests.asking import Reports

pytestmark = pytest.mark.filterwarnings("ignore")

MANUAL = "Mara Lindell was born in Oslo. She works as a baker in the old town. Otto Brandt paints ships. " * 6
QUESTIONS = ("Where was Mara Lindell born?", "What does Otto paint?")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    sizes = {"vocab_size": len(load_tokenizer()), "max_position_embeddings": 2048, "eos_token_id": None}
    return tiny_model(tiny_config("qwen3_next", **sizes))


def held(folder: Path) -> int:
    return len(list(folder.rglob("*.safetensors")))


@pytest.mark.parametrize("streaming", [False, True])
def test_llama_index(make_hybrid: MakeHybrid, model: PreTrainedModel, tmp_path: Path, streaming: bool) -> None:
    engine = make_hybrid(model, load_tokenizer(), filled=False, store=tmp_path)
    llm = llama_index_cacheblend.BlendLLM(engine=engine, max_new_tokens=6)
    store = llama_index_cacheblend.BlendVectorStore(SimpleVectorStore(), engine=engine)
    index = VectorStoreIndex.from_documents(
        [LlamaDocument(text=MANUAL, id_="manual")],
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=MockEmbedding(8),
    )
    queries: Any = index.as_query_engine(
        llm=llm,
        similarity_top_k=1,
        response_synthesizer=llama_index_cacheblend.BlendSynthesizer(llm, streaming=streaming),
    )
    for hits, question in zip((0, 1), QUESTIONS, strict=True):
        answer = queries.query(question)
        text = "".join(answer.response_gen) if streaming else answer.response
        report = answer.metadata["blend"]
        assert text and report["hits"] == hits, report
        assert report["recomputed_tokens"] == 0 or not hits
    engine.flush()
    assert held(tmp_path) == 1
    index.delete_ref_doc("manual")
    assert held(tmp_path) == 0


@pytest.mark.parametrize("own_chain", [True, False])
def test_langchain(make_hybrid: MakeHybrid, model: PreTrainedModel, tmp_path: Path, own_chain: bool) -> None:
    engine = make_hybrid(model, load_tokenizer(), filled=False, store=tmp_path)
    store = langchain_cacheblend.BlendVectorStore(
        InMemoryVectorStore(DeterministicFakeEmbedding(size=8)), engine=engine
    )
    [id] = store.add_documents([Document(MANUAL)])
    llm = langchain_cacheblend.ChatBlend(engine=engine, max_tokens=6)
    template = ChatPromptTemplate.from_messages(
        [("system", "Answer from these facts.\n{context}"), ("human", "{input}")]
    )
    make = langchain_cacheblend.create_blend_documents_chain if own_chain else create_stuff_documents_chain
    chain = make(llm, template)
    for hits, question in zip((0, 1), QUESTIONS, strict=True):
        reports, given = Reports(), {"context": store.similarity_search(question, k=1), "input": question}
        assert "".join(chain.stream(given, {"callbacks": [reports]}))
        assert reports.hits == [hits]
    engine.flush()
    # No chain says that its head is fixed, so the state stays in memory.
    assert held(tmp_path) == 0
    store.delete([id])


@pytest.mark.parametrize(("separator", "hits"), [("", 3), (BLANK_LINE, 3), (" and ", 1)])
def test_blanks_between_chunks(make_hybrid: MakeHybrid, model: PreTrainedModel, separator: str, hits: int) -> None:
    engine = make_hybrid(model, load_tokenizer(), config=EngineConfig(separator=separator.strip(" and")), filled=False)
    engine.add([Chunk(MANUAL[start : start + 50], str(start), document="d", start=start) for start in (0, 50, 100)])
    prompt = BlendPrompt(FixedText("Read.\n"), ["0", "50", "100"], QUESTIONS[0], separator or "\n")
    assert engine.prefill(prompt).report.misses == 3
    found = engine.prefill(prompt)
    assert found.report.hits == hits
    assert (found.logits - own_logits(engine, prompt)).abs().max() < 1e-4 * found.logits.abs().max()
