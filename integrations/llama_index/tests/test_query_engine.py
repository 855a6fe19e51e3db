"""The response mode that `install` makes known: over an engine and over a server, each form of call says what the model says."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import llama_index.core
import pytest
from llama_index.core import PromptHelper, VectorStoreIndex
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine, retriever_query_engine
from llama_index.core.response_synthesizers import ResponseMode, factory
from llama_index.core.schema import MetadataMode
from llama_index.vector_stores.chroma import ChromaVectorStore

from cacheblend_attachments import calibrate, calibrate_asking, inspector_page
from cacheblend_rag import BlendConfig
from cacheblend_rag.errors import ConfigError
from integrations.llama_index.tests.conftest import (
    EVERY_ROW,
    FACTS,
    FORMS,
    EventLog,
    Nodes,
    ask,
    own_answer,
)
from integrations.serve.tests.conftest import serving
from llama_index_cacheblend import (
    BlendCondensePlusContextChatEngine,
    BlendContextChatEngine,
    BlendLLM,
    BlendRetriever,
    BlendSynthesizer,
    BlendVectorStore,
    install,
    uninstall,
    warm_index,
)
from llama_index_cacheblend.context import make_context_prompt
from llama_index_cacheblend.nodes import node_chunks
from llama_index_cacheblend.report import AnswerReport

QUESTION = "Where was Mara Lindell born?"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ratio", [1.0, EVERY_ROW])
async def test_every_form_answers_as_the_model_itself_and_as_compact_mode(
    llm: BlendLLM, index: VectorStoreIndex, events: EventLog, form: str, ratio: float
) -> None:
    install()
    blending = llm.engine.blend.replace(recompute_ratio=ratio)
    llm = BlendLLM(engine=llm, max_new_tokens=12, blend_config=blending)
    compact, blend = (
        index.as_query_engine(llm=llm, similarity_top_k=3, streaming="stream" in form, response_mode=mode)
        for mode in ("compact", "blend")
    )
    tokenizer = llm.engine.tokenizer
    for question in (QUESTION, "Who paints ships?"):
        events.events.clear()
        expected, plain = await ask(compact, form, question)
        said, response = await ask(blend, form, question)
        theirs, ours = [event.response.raw for event in events.of(LLMChatEndEvent)]
        ids = llm.engine.prompt_ids(events.of(LLMChatStartEvent)[-1].additional_kwargs["blend_prompt"])
        assert ours["token_ids"] == own_answer(llm, ids) == theirs["token_ids"]
        assert said == expected == tokenizer.decode(ours["token_ids"], skip_special_tokens=True)
        assert ours["usage"] == theirs["usage"]
        assert ours["usage"]["prompt_tokens"] == len(ids)
        nodes = [(each.node_id, each.score) for each in response.source_nodes]
        assert nodes == [(each.node_id, each.score) for each in plain.source_nodes] and len(nodes) == 3
        report = response.metadata["blend"]
        assert (report["hits"], report["misses"]) == (3, 0)
        assert [chunk["id"] for chunk in report["chunks"]] == [name for name, _ in nodes]


@pytest.fixture
def address(llm: BlendLLM) -> Iterator[str]:
    with serving(llm.engine) as address:
        yield address


@pytest.mark.parametrize("form", FORMS)
async def test_a_server_answers_as_the_engine_itself(
    llm: BlendLLM, index: VectorStoreIndex, address: str, form: str
) -> None:
    install()
    served = BlendLLM(server=address, max_new_tokens=12)
    assert served.model_name == llm.model_name
    there, here = (
        index.as_query_engine(llm=each, response_mode="blend", streaming="stream" in form) for each in (served, llm)
    )
    expected, _ = await ask(here, form, QUESTION)
    said, answer = await ask(there, form, QUESTION)
    assert said == expected
    assert answer.metadata["blend"]["hits"] == len(answer.source_nodes) > 0


def test_a_store_over_a_server_adds_and_deletes_there(
    llm: BlendLLM, address: str, chroma: ChromaVectorStore, nodes: Nodes, embedding: object
) -> None:
    store = BlendVectorStore(chroma, server=address)
    index = VectorStoreIndex.from_vector_store(store, embed_model=embedding)  # type: ignore[arg-type]
    index.insert_nodes([each.node for each in nodes])
    assert len(llm.engine.ids()) == len(FACTS)
    index.delete_nodes(["n0"])
    assert sorted(llm.engine.ids()) == ["n1", "n2", "n3", "n4"]
    assert warm_index(index).unchanged == 4
    served = BlendLLM(server=address, max_new_tokens=8)
    assert BlendRetriever(index.as_retriever(), served).retrieve(QUESTION)
    chat = BlendContextChatEngine.from_defaults(index.as_retriever(), llm=served)
    first = chat.chat(QUESTION)
    chat.reset()
    assert str(chat.chat(QUESTION)) == str(first)


def test_server_and_engine_exclude_each_other(llm: BlendLLM, address: str, chroma: ChromaVectorStore) -> None:
    with pytest.raises(ConfigError):
        BlendVectorStore(chroma, engine=llm, server=address)
    for options in ({"model": "reference"}, {"store": "./kv"}):
        with pytest.raises(ConfigError):
            BlendLLM(server=address, **options)


# Two modes without a language model want one all the same.
OTHER_MODES = [mode for mode in ResponseMode if mode not in (ResponseMode.NO_TEXT, ResponseMode.CONTEXT_ONLY)]


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


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "accumulate", "citation"])
def test_llama_indexs_own_synthesizers_find_the_kv_of_nodes(
    llm: BlendLLM, index: VectorStoreIndex, events: EventLog, mode: str
) -> None:
    """Which write the nodes' texts into prompts themselves, citations behind the numbers of their sources."""
    if mode == "citation":
        # What metadata the model is shown belongs to the text, and a source is not to be cut where the node was not.
        engine: Any = CitationQueryEngine.from_args(index, llm, similarity_top_k=2, metadata_mode=MetadataMode.LLM)
    else:
        engine = index.as_query_engine(llm=llm, similarity_top_k=2, response_mode=mode)
    found = {each.node.get_content() for each in index.as_retriever(similarity_top_k=2).retrieve(QUESTION)}
    engine.query(QUESTION)
    reports = [event.response.raw["blend"] for event in events.of(LLMChatEndEvent)]
    hits = [chunk["id"] for report in reports for chunk in report["chunks"] if chunk["hit"]]
    assert [FACTS[int(id[1:])] in found for id in hits] == [True, True]


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


QUESTIONS = ["Where was Mara Lindell born?", "Who runs the harbour office?", "Who paints ships?"]
ASKED: dict[str, Any] = {"ratios": (0.0, 0.5), "target": 0.3, "max_new_tokens": 6}


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_calibration_finds_what_prompts_show(index: VectorStoreIndex, llm: BlendLLM, streaming: bool) -> None:
    blend = BlendConfig(selector="boundary")
    synthesizer = BlendSynthesizer(llm=llm, streaming=streaming, blend_config=blend)
    query_engine = index.as_query_engine(llm=llm, response_synthesizer=synthesizer, similarity_top_k=2)
    found = calibrate_asking(query_engine.query, QUESTIONS, **ASKED)
    assert (found.questions, found.skipped, found.selector) == (3, 0, "boundary")
    prompts = []
    for question in QUESTIONS:
        chunks = node_chunks(each.node for each in index.as_retriever(similarity_top_k=2).retrieve(question))
        template = synthesizer.get_prompts()["text_qa_template"]
        prompts.append(make_context_prompt(llm, template, chunks, {"query_str": question}, keeps_head=True).blend)
    own = calibrate(llm.engine, prompts, blend=blend, **ASKED)
    assert [replace(row, ttft_ratio=0.0) for row in own.rows] == [replace(row, ttft_ratio=0.0) for row in found.rows]
