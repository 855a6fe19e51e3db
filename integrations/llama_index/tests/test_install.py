"""The response mode that `install` makes known, and what carries a report then."""

import json
from typing import Any

import llama_index.core
import pytest
from llama_index.core import PromptHelper, SimpleKeywordTableIndex, SummaryIndex, TreeIndex, VectorStoreIndex
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine, retriever_query_engine
from llama_index.core.response_synthesizers import ResponseMode, factory

from cacheblend_attachments import inspector_page
from cacheblend_rag.errors import ConfigError
from integrations.llama_index.tests.conftest import Nodes
from llama_index_cacheblend import (
    BlendCondensePlusContextChatEngine,
    BlendContextChatEngine,
    BlendLLM,
    BlendSynthesizer,
    install,
    uninstall,
)
from llama_index_cacheblend.report import AnswerReport

# Two modes without a language model want one all the same.
OTHER_MODES = [mode for mode in ResponseMode if mode not in (ResponseMode.NO_TEXT, ResponseMode.CONTEXT_ONLY)]
QUESTION = "Where was Mara Lindell born?"


def test_the_mode_is_known_between_install_and_uninstall(index: VectorStoreIndex, llm: BlendLLM) -> None:
    for _ in range(2):
        for make in (index.as_query_engine, index.as_chat_engine):
            with pytest.raises(ValueError, match="blend"):
                make(response_mode="blend", llm=llm)
        install()
        install()
        assert index.as_query_engine(response_mode="blend", llm=llm, similarity_top_k=2).query(QUESTION)
        made = [
            type(index.as_chat_engine(mode, llm=llm, response_mode="blend"))
            for mode in ("context", "condense_plus_context", "best")
        ]
        assert made == [BlendContextChatEngine, *[BlendCondensePlusContextChatEngine] * 2]
        assert type(index.as_chat_engine("context", llm=llm)) is ContextChatEngine
        uninstall()
        uninstall()


@pytest.mark.parametrize("mode", OTHER_MODES)
def test_other_modes_are_as_they_were(llm: BlendLLM, mode: ResponseMode) -> None:
    before = type(factory.get_response_synthesizer(llm=llm, response_mode=mode))
    install()
    # By whatever name a module holds it.
    for door in (llama_index.core.get_response_synthesizer, retriever_query_engine.get_response_synthesizer):
        assert type(door(llm=llm, response_mode=mode)) is before
        assert type(door(llm, response_mode="blend")) is BlendSynthesizer


def test_options_of_the_factory_arrive_or_are_refused(llm: BlendLLM) -> None:
    install()
    helper = PromptHelper(context_window=900, num_output=20, tokenizer=str.split)
    refine = PromptTemplate("{context_msg}")
    made = factory.get_response_synthesizer(llm, helper, refine_template=refine, response_mode="blend")  # type: ignore[arg-type]
    assert made._prompt_helper is helper
    assert made.get_prompts()["refine_template"].template == "{context_msg}"
    for name in ("multimodal", "structured_answer_filtering"):
        with pytest.raises(ConfigError, match=name):
            factory.get_response_synthesizer(llm=llm, response_mode="blend", **{name: True})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="MockLLM"):
        factory.get_response_synthesizer(llm=MockLLM(), response_mode="blend")  # type: ignore[arg-type]


def test_a_chat_over_a_query_engine(index: VectorStoreIndex, llm: BlendLLM) -> None:
    install()
    memory = ChatMemoryBuffer.from_defaults(tokenizer_fn=str.split)
    chat = index.as_chat_engine("condense_question", llm=llm, response_mode="blend", similarity_top_k=2, memory=memory)
    [source] = chat.chat(QUESTION).sources
    assert source.raw_output.metadata["blend"]["hits"] == 2
    engine = RetrieverQueryEngine.from_args(index.as_retriever(), llm=llm, response_mode="blend")
    assert engine.query(QUESTION).metadata["blend"]["hits"] == 2


@pytest.mark.parametrize("kind", ["summary", "keyword", "tree", "tree leaves"])
def test_indices_without_vectors_blend_what_they_retrieve(llm: BlendLLM, nodes: Nodes, kind: str) -> None:
    install()
    plain = [each.node for each in nodes]
    index = {
        "summary": lambda: SummaryIndex(plain),
        "keyword": lambda: SimpleKeywordTableIndex(plain, llm=llm),
        "tree": lambda: TreeIndex(plain, llm=llm),
        "tree leaves": lambda: TreeIndex(plain, llm=llm),
    }[kind]()
    options: Any = {"tree": {"retriever_mode": "root"}, "tree leaves": {"retriever_mode": "all_leaf"}}.get(kind, {})
    compact = index.as_query_engine(llm=llm, **options).query(QUESTION)
    engine = index.as_query_engine(llm=llm, response_mode="blend", **options)
    first, second = engine.query(QUESTION), engine.query(QUESTION)
    assert str(first) == str(second) == str(compact)
    count = len(compact.source_nodes)
    assert count > 0
    assert (first.metadata["blend"]["misses"], second.metadata["blend"]["hits"]) == (count, count)


def test_a_report_is_printed_written_and_drawn(index: VectorStoreIndex, llm: BlendLLM) -> None:
    install()
    engine = index.as_query_engine(llm=llm, response_mode="blend", similarity_top_k=2, streaming=True)
    llm.engine.delete(["n0"])
    response = engine.query(QUESTION)
    report = response.metadata["blend"]
    assert report == {}
    str(response)
    first, *others = str(report).splitlines()
    assert "1 of 2 chunks hit" in first
    assert others == [f"  {each['id']}: {each['reason']}" for each in report["chunks"] if each["reason"]]
    assert json.loads(json.dumps(report)) == report
    assert all(chunk["id"] in inspector_page(llm.engine, report) for chunk in report["chunks"])
    with pytest.raises(ConfigError):
        inspector_page(llm.engine, AnswerReport())
