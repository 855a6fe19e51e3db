"""The report of an answer, in every response mode, query engine and chat engine, and what calibration learns from it."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from llama_index.core import PromptTemplate, SummaryIndex, VectorStoreIndex
from llama_index.core.base.base_selector import SelectorResult, SingleSelection
from llama_index.core.base.response.schema import StreamingResponse
from llama_index.core.chat_engine import CondenseQuestionChatEngine, ContextChatEngine, SimpleChatEngine
from llama_index.core.chat_engine.types import ChatMode
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import CustomQueryEngine, RouterQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import QueryEngineTool

from cacheblend_attachments import calibrate as calibrate_prompts
from cacheblend_attachments import inspector_page
from cacheblend_rag import BlendConfig
from cacheblend_rag.errors import ConfigError
from integrations.llama_index.tests.conftest import EventLog, Nodes, WordEmbedding
from llama_index_cacheblend import BlendLLM, BlendSynthesizer, calibrate, install, uninstall
from llama_index_cacheblend.report import AnswerReport, Calls

QUESTION = "Where was Mara Lindell born?"
SAMPLED = ("accumulate", "blend", "compact", "tree_summarize")
ASKING = [
    mode if mode in SAMPLED else pytest.param(mode, marks=pytest.mark.full)
    for mode in (*(each.value for each in ResponseMode if each.value not in ("no_text", "context_only")), "blend")
]


@pytest.fixture(autouse=True)
def _installed(_not_installed: None) -> None:
    install()


@pytest.fixture
def index(nodes: Nodes, embedding: WordEmbedding) -> VectorStoreIndex:
    return VectorStoreIndex([each.node for each in nodes], embed_model=embedding)


async def read(response: Any) -> str:
    stream = getattr(response, "async_response_gen", None) or response.response_gen
    pieces = stream() if callable(stream) else stream
    return "".join([piece async for piece in pieces] if isinstance(pieces, AsyncIterator) else pieces)


def check(report: Any, events: EventLog) -> None:
    """A report of all calls that the model was asked."""
    assert isinstance(report, AnswerReport) and report["output_tokens"] == 12
    assert 1 + len(report["earlier_calls"]) == len(events.of(LLMChatEndEvent))
    assert str(report).count("first token after") == 1 + len(report["earlier_calls"])
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("mode", ASKING)
async def test_modes(
    index: VectorStoreIndex, llm: BlendLLM, events: EventLog, mode: str, asynchronous: bool, streaming: bool
) -> None:
    streaming = streaming and "accumulate" not in mode
    engine = index.as_query_engine(llm=llm, response_mode=mode, similarity_top_k=3, streaming=streaming)
    response = await engine.aquery(QUESTION) if asynchronous else await asyncio.to_thread(engine.query, QUESTION)
    if streaming:
        read_it = read(response) if asynchronous else asyncio.to_thread(lambda: "".join(response.response_gen))
        assert await read_it
    check(response.metadata["blend"], events)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("mode", [ChatMode.SIMPLE, ChatMode.CONTEXT, ChatMode.CONDENSE_QUESTION, ChatMode.BEST])
async def test_chats(index: VectorStoreIndex, llm: BlendLLM, mode: Any, asynchronous: bool, streaming: bool) -> None:
    memory = ChatMemoryBuffer.from_defaults()
    chat = index.as_chat_engine(chat_mode=mode, llm=llm, memory=memory, similarity_top_k=2, streaming=streaming)
    name = ("a" if asynchronous else "") + ("stream_chat" if streaming else "chat")
    for _ in range(2):
        if asynchronous:
            response = await getattr(chat, name)(QUESTION)
            if streaming:
                await read(response)
        else:
            response = await asyncio.to_thread(getattr(chat, name), QUESTION)
            if streaming:
                await asyncio.to_thread(lambda response: "".join(response.response_gen), response)
        report = response.metadata["blend"]
        assert isinstance(report, AnswerReport) and report["output_tokens"] == 12
        assert str(report).startswith("first token after")


def test_engines_that_ask_by_themselves(index: VectorStoreIndex, llm: BlendLLM) -> None:
    class Asks(CustomQueryEngine):
        llm: Any

        def custom_query(self, query_str: str) -> str:
            return str(self.llm.predict(PromptTemplate("{question}"), question=query_str))

    assert Asks(llm=llm).query(QUESTION).metadata["blend"]["output_tokens"] == 12

    class Recites(CustomQueryEngine):
        def custom_query(self, query_str: str) -> Any:
            # No generator, as LlamaIndex has it, but it works.
            return StreamingResponse(iter(["Os", "lo"]))  # type: ignore[arg-type]

    assert str(Recites().query(QUESTION)) == "Oslo"

    class Chooses(LLMSingleSelector):
        def _select(self, choices: Any, query: Any) -> SelectorResult:
            llm.complete("Which one?")
            return SelectorResult(selections=[SingleSelection(index=0, reason="the only one")])

    tool = QueryEngineTool.from_defaults(index.as_query_engine(llm=llm, response_mode="blend"), description="people")
    routed = RouterQueryEngine(Chooses.from_defaults(llm=llm), [tool], llm=llm).query(QUESTION)
    assert routed.metadata["blend"]["hits"] + routed.metadata["blend"]["misses"] == 2


@pytest.mark.parametrize("mode", ["compact", "blend"])
def test_it_is_none_where_nothing_was_retrieved(llm: BlendLLM, mode: str) -> None:
    response = SummaryIndex([]).as_query_engine(llm=llm, response_mode=mode).query(QUESTION)
    assert response.metadata == {"blend": None}


def test_uninstalling_leaves_nothing_behind(index: VectorStoreIndex, llm: BlendLLM) -> None:
    uninstall()
    assert "blend" not in index.as_query_engine(llm=llm, similarity_top_k=1).query(QUESTION).metadata
    assert SimpleChatEngine.from_defaults(llm=llm).chat(QUESTION).metadata is None


def test_other_models_have_none(index: VectorStoreIndex) -> None:
    query_engine = index.as_query_engine(llm=MockLLM(), similarity_top_k=1)
    assert "blend" not in query_engine.query(QUESTION).metadata
    memory = ChatMemoryBuffer.from_defaults()
    assert SimpleChatEngine.from_defaults(llm=MockLLM(), memory=memory).chat("Hello").metadata is None
    for kind in (ContextChatEngine, CondenseQuestionChatEngine):
        given = {"retriever": index.as_retriever()} if kind is ContextChatEngine else {"query_engine": query_engine}
        assert kind.from_defaults(llm=MockLLM(), memory=memory, **given).chat("Hello").metadata is None  # type: ignore[attr-defined]


async def test_calls_of_questions_at_once_are_kept_apart(index: VectorStoreIndex, llm: BlendLLM) -> None:
    engine = index.as_query_engine(llm=llm, response_mode="refine", similarity_top_k=3)
    responses = await asyncio.gather(*(engine.aquery(f"{QUESTION} {number}") for number in range(4)))
    assert [len(response.metadata["blend"]["earlier_calls"]) for response in responses] == [2] * 4


def test_what_is_printed(index: VectorStoreIndex, llm: BlendLLM) -> None:
    engine = index.as_query_engine(llm=llm, response_mode="blend", similarity_top_k=2, streaming=True)
    response = engine.query(QUESTION)
    report = response.metadata["blend"]
    assert str(report) == "no report: the answer is not finished"
    str(response)
    first, *others = str(report).splitlines()
    assert "0 of 2 chunks hit" in first and others == [f"  {each['id']}: {each['reason']}" for each in report["chunks"]]
    report["dropped"] = ["n7", "n8"]
    assert str(report).endswith("\nno room for n7, n8")


def test_a_page_of_the_answer(index: VectorStoreIndex, llm: BlendLLM) -> None:
    response = index.as_query_engine(llm=llm, response_mode="blend", similarity_top_k=3).query(QUESTION)
    report = response.metadata["blend"]
    page = inspector_page(llm.engine, report)
    assert page._repr_html_().startswith("<iframe")
    assert page.startswith("<!DOCTYPE html>")
    assert all(chunk["id"] in page for chunk in report["chunks"])
    with pytest.raises(ConfigError, match="not finished"):
        inspector_page(llm.engine, AnswerReport())


QUESTIONS = ["Where was Mara Lindell born?", "Who runs the harbour office?", "Who paints ships?"]
ASKED: dict[str, Any] = {"ratios": (0.0, 0.5), "target": 0.3, "max_new_tokens": 6}


@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.full)], ids=["whole", "streamed"])
def test_it_finds_what_prompts_show(index: VectorStoreIndex, llm: BlendLLM, streaming: bool) -> None:
    synthesizer = BlendSynthesizer(llm=llm, streaming=streaming, blend_config=BlendConfig(selector="boundary"))
    query_engine = index.as_query_engine(llm=llm, response_synthesizer=synthesizer, similarity_top_k=2)
    found = calibrate(query_engine, QUESTIONS, **ASKED)
    assert (found.questions, found.skipped, found.selector) == (3, 0, "boundary")
    with Calls() as calls:
        for question in QUESTIONS:
            str(query_engine.query(question))
    own = calibrate_prompts(llm.engine, [c.prompt for c in calls.made], blend=BlendConfig(selector="boundary"), **ASKED)
    assert own.recompute_ratio == found.recompute_ratio and len(own.rows) == len(found.rows)
    for row, other in zip(found.rows, own.rows, strict=True):
        assert replace(row, ttft_ratio=0.0) == replace(other, ttft_ratio=0.0)


def test_right_answers_and_another_selector_are_passed_on(index: VectorStoreIndex, llm: BlendLLM) -> None:
    install()
    query_engine = index.as_query_engine(llm=llm, response_mode="blend", similarity_top_k=1)
    seen: list[str] = []
    plain = calibrate(query_engine, QUESTIONS, progress=seen.append, **ASKED)
    assert seen[0] == "asking question 1 of 3"
    other = calibrate(query_engine, QUESTIONS, answers=["Lisbon"] * 3, selector="random(seed=1)", **ASKED)
    assert other.selector == "random" and other.full_loss != plain.full_loss


class Unasked(CustomQueryEngine):
    """Must not be asked."""

    def custom_query(self, query_str: str) -> str:
        raise AssertionError(query_str)


def test_what_cannot_be_calibrated_is_said(index: VectorStoreIndex, llm: BlendLLM) -> None:
    with pytest.raises(ConfigError, match=r"target=0 must be above 0"):
        calibrate(Unasked(), QUESTIONS, target=0)
    with pytest.raises(ConfigError, match=r"questions='Where\?' is a string; give a list"):
        calibrate(Unasked(), "Where?")
    with pytest.raises(TypeError, match="ratio"):
        calibrate(Unasked(), QUESTIONS, ratio=0.5)
    with pytest.raises(ConfigError, match=r"query_engine is a BlendLLM; give what index.as_query_engine"):
        calibrate(llm, QUESTIONS)  # type: ignore[arg-type]
    compact = index.as_query_engine(llm=llm, similarity_top_k=1)
    with pytest.raises(ConfigError, match="none of 3 questions was answered by blending chunks"):
        calibrate(compact, QUESTIONS, **ASKED)
