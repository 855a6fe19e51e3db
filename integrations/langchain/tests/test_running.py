"""How models are run: caches, tracing, events, time limits, cancellation, being written down."""

import asyncio
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from transformers import LlamaForCausalLM

from cacheblend_lab.settings import settings_of
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk, EngineConfig
from cacheblend_rag.errors import AnswerTimeoutError, ConfigError
from integrations.langchain.tests.asking import KINDS, Kind, text_of
from langchain_cacheblend import BlendLLM, ChatBlend
from tests.core.test_engine import Held

TOKENS = 8


class Counting(InMemoryCache):
    """A real cache that knows how many answers it keeps."""

    @property
    def size(self) -> int:
        return len(self._cache)


# Caches


@KINDS
async def test_cached_answers_are_kept(kind: Kind, engine: BlendEngine, tiny: LlamaForCausalLM, tokenizer: Any) -> None:
    cache = Counting()
    make = partial(kind, max_tokens=TOKENS, cache=cache, temperature=0)
    llm = make(engine=engine)
    first = text_of(llm.invoke("Who?"))
    assert text_of(llm.invoke("Who?", timeout=50)) == text_of(await llm.ainvoke("Who?", timeout=60)) == first
    assert text_of(llm.invoke("Who?")) == text_of(await llm.ainvoke("Who?")) == first
    assert cache.size == 1
    exact = engine.blend.replace(recompute_ratio=1.0)
    with BlendEngine(tiny, tokenizer, **settings_of(engine)) as other:
        asks = [
            lambda: llm.invoke("Who?", blend_config=exact),
            lambda: llm.bind(blend_config=exact.replace(recompute_ratio=0.5)).invoke("Who?"),
            lambda: llm.invoke("Who?", max_tokens=3),
            lambda: llm.invoke("Who?", stop=["never"]),
            lambda: llm.invoke("Who?", repetition_penalty=1.2),
            lambda: llm.invoke("Who?", documents=[Document("A text.")]),
            lambda: make(engine=engine, stop=["nevermore"]).invoke("Who?"),
            lambda: make(engine=engine, blend_config=exact).invoke("Who"),
            lambda: make(engine=other).invoke("Who?"),
        ]
        for number, ask in enumerate(asks, 2):
            for _ in range(2):
                ask()
                assert cache.size == number
    assert len(text_of(llm.invoke("Who?", max_tokens=3))) < len(first)


# Tracing, and what other parts of LangChain ask


@KINDS
def test_what_tracing_is_told(kind: Kind, engine: BlendEngine) -> None:
    llm = kind(engine=engine, temperature=0.5, max_tokens=7, stop=["x"])
    params = llm._get_ls_params()
    assert params["ls_provider"] == "cacheblend"
    assert (params["ls_model_name"], params["ls_temperature"], params["ls_max_tokens"]) == (engine.model_name, 0.5, 7)
    assert params["ls_stop"] == ["x"]
    assert llm._get_ls_params(stop=["y"], temperature=0.1)["ls_stop"] == ["y"]
    assert llm._get_ls_params(temperature=0.1)["ls_temperature"] == 0.1
    remote = EngineConfig(remote="redis://:secret@nowhere")
    secret = kind(model="reference", engine_config=remote, api_key="secret")
    assert "secret" not in f"{secret._identifying_params} {secret!r} {dumpd(secret)}"
    secret.engine.close()


def test_counting_tokens_is_the_models_own(engine: BlendEngine) -> None:
    llm = ChatBlend(engine=engine)
    assert llm.get_num_tokens("Mara Lind") == len(llm.get_token_ids("Mara Lind"))
    assert ChatBlend(engine=engine, custom_get_token_ids=lambda text: [1, 2]).get_num_tokens("Mara") == 2
    assert BlendLLM(engine=engine).get_num_tokens_from_messages([HumanMessage("Mara")]) == len(
        BlendLLM(engine=engine).get_token_ids("Human: Mara")
    )


@KINDS
def test_fields_can_be_configured(kind: Kind, engine: BlendEngine) -> None:
    llm = kind(engine=engine, max_tokens=TOKENS)
    configurable = llm.configurable_fields(
        max_tokens=ConfigurableField(id="tokens"), blend_config=ConfigurableField(id="blend")
    )
    short = configurable.with_config(configurable={"tokens": 2}).invoke("Who?")
    assert len(text_of(short)) < len(text_of(configurable.invoke("Who?")))
    with pytest.raises(ConfigError, match="max_tokens"):
        configurable.with_config(configurable={"tokens": 0}).invoke("Who?")
    chosen = llm.configurable_alternatives(ConfigurableField(id="which"), short=kind(engine=engine, max_tokens=1))
    assert len(text_of(chosen.with_config(configurable={"which": "short"}).invoke("Who?"))) < len(text_of(short)) + 8
    tiny_ratio = configurable.with_config(configurable={"blend": engine.blend.replace(enabled=False)})
    assert text_of(tiny_ratio.invoke("Who?")) == text_of(llm.invoke("Who?"))


@KINDS
def test_an_engine_answers_under_the_name_of_its_own_model_only(kind: Kind, engine: BlendEngine) -> None:
    llm = kind(engine=engine, max_tokens=TOKENS)
    for model in (engine.model_name, engine.model.name_or_path or engine.model_name):
        assert kind(engine=engine, model=model).model == engine.model_name
    with pytest.raises(ConfigError, match=r"model='another' is not .* configurable_alternatives"):
        kind(engine=engine, model="another")
    assert text_of(llm.invoke("Who?", model=engine.model_name)) == text_of(llm.invoke("Who?"))
    with pytest.raises(ConfigError, match="make another"):
        llm.invoke("Who?", model="other")
    configurable = llm.configurable_fields(model=ConfigurableField(id="model"))
    assert text_of(configurable.invoke("Who?")) == text_of(llm.invoke("Who?"))
    with pytest.raises(ConfigError, match="configurable_alternatives"):
        configurable.with_config(configurable={"model": "another"}).invoke("Who?")


def test_an_engine_is_known_by_the_name_it_was_loaded_by(reference: BlendEngine) -> None:
    assert reference.model_name == "reference"
    assert ChatBlend(engine=reference).model == ChatBlend(model="reference", engine=reference).model == "reference"


# Being written down


def trusting(kind: Kind) -> dict[str, Any]:
    """What `load` has to be told, which in early releases is less."""
    options = {"allowed_objects": [kind], "valid_namespaces": ["langchain_cacheblend"]}
    return {name: value for name, value in options.items() if name in inspect.signature(load).parameters}


LOAD_IS_BETA = pytest.mark.filterwarnings("ignore:The function `load` is in beta")


@LOAD_IS_BETA
@KINDS
def test_a_named_model_is_written_down(kind: Kind, tiny: LlamaForCausalLM, tokenizer: Any, tmp_path: Path) -> None:
    tiny.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    blend = BlendConfig(recompute_ratio=0.4)
    options = {"max_tokens": TOKENS, "stop": ["never"], "generation_kwargs": {"repetition_penalty": 1.1}}
    options["model_kwargs"] = {"dtype": torch.bfloat16}
    llm = kind(model=tmp_path / "model", store=tmp_path / "kv", blend_config=blend, **options)
    written = dumpd(llm)
    assert written["type"] == "constructor"
    again = load(written, **trusting(kind))
    assert again._identifying_params == llm._identifying_params
    assert again.engine is not llm.engine
    assert again.engine.model.dtype == llm.engine.model.dtype == torch.bfloat16
    assert again.engine.config == llm.engine.config == EngineConfig(separator="\n\n")
    assert again.engine.blend == llm.engine.blend == blend
    assert text_of(again.invoke("Who?")) == text_of(llm.invoke("Who?"))
    for each in (llm, again):
        each.engine.close()


@LOAD_IS_BETA
@KINDS
def test_what_cannot_be_written_down_says_so(kind: Kind, engine: BlendEngine) -> None:
    llm = kind(engine=engine)
    written = dumpd(llm)
    assert written["type"] == "not_implemented"
    with pytest.raises(NotImplementedError):
        load(written, **trusting(kind))


# Events, time and cancellation


@KINDS
async def test_events_come_in_order(kind: Kind, engine: BlendEngine) -> None:
    llm = kind(engine=engine, max_tokens=TOKENS)
    chain = ChatPromptTemplate.from_template("{question}") | llm
    events = [event async for event in chain.astream_events({"question": "Who?"}, version="v2")]
    word = "llm" if kind is BlendLLM else "chat_model"
    names = [event["event"] for event in events if word in event["event"]]
    assert names[0] == f"on_{word}_start"
    assert names[-1] == f"on_{word}_end"
    assert set(names[1:-1]) == {f"on_{word}_stream"}
    assert len(names) > 3
    pieces = [event["data"]["chunk"] for event in events if event["event"] == f"on_{word}_stream"]
    streamed = "".join(piece if isinstance(piece, str) else piece.text for piece in pieces)
    assert streamed == text_of(await chain.ainvoke({"question": "Who?"}))
    assert (events[0]["event"], events[-1]["event"]) == ("on_chain_start", "on_chain_end")


async def test_invoke_streams_where_it_is_asked_to(engine: BlendEngine) -> None:
    plain = ChatBlend(engine=engine, max_tokens=TOKENS)
    streaming = ChatBlend(engine=engine, max_tokens=TOKENS, streaming=True)
    one, other = plain.invoke("Who?"), streaming.invoke("Who?")
    assert isinstance(one, AIMessage)
    assert isinstance(other, AIMessage)
    assert (one.content, one.usage_metadata) == (other.content, other.usage_metadata)


@KINDS
def test_a_call_that_takes_too_long_is_given_up(kind: Kind, engine: BlendEngine) -> None:
    llm = kind(engine=engine, max_tokens=1500, timeout=0.05)
    for ask in (lambda: llm.invoke("Who?"), lambda: list(llm.stream("Who?")), lambda: asyncio.run(llm.ainvoke("Who?"))):
        with pytest.raises(AnswerTimeoutError, match=r"timeout=0\.05 s"):
            ask()
    assert isinstance(AnswerTimeoutError("x"), TimeoutError)
    for timeout in (0, -1, "soon"):
        with pytest.raises(ConfigError, match="timeout="):
            llm.invoke("Who?", timeout=timeout)
    with pytest.raises(ConfigError, match="there is a dict among the documents"):
        llm.invoke("Who?", documents=[{"text": "A text."}])
    assert text_of(llm.invoke("Who?", timeout=60, max_tokens=2))


@KINDS
async def test_a_call_that_waits_for_the_model_too_long_is_given_up(kind: Kind, engine: BlendEngine) -> None:
    held = Held()
    stream = engine.stream(BlendPrompt("A question"), 4, stopping_criteria=[held])
    held.begun.wait(60)
    llm = kind(engine=engine, max_tokens=TOKENS, timeout=0.05)
    try:
        for ask in (lambda: llm.invoke("Who?"), lambda: list(llm.stream("Who?")), lambda: llm.batch(["Who?", "Why?"])):
            with pytest.raises(AnswerTimeoutError, match="the model was busy with other calls"):
                ask()
        with pytest.raises(AnswerTimeoutError, match="the model was busy with other calls"):
            await llm.ainvoke("Who?")
    finally:
        held.go_on.set()
    assert stream.result().token_ids
    assert text_of(llm.invoke("Who?", timeout=60))


@KINDS
async def test_calls_that_wait_for_the_model_leave_the_loops_threads_to_others(kind: Kind, engine: BlendEngine) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    llm = kind(engine=engine, max_tokens=TOKENS)

    async def read() -> str:
        return "".join([text_of(piece) async for piece in llm.astream("Who?")])

    held = Held()
    stream = engine.stream(BlendPrompt("A question"), 4, stopping_criteria=[held])
    try:
        held.begun.wait(60)
        tasks = [asyncio.create_task(each) for _ in range(4) for each in (read(), llm.ainvoke("Who?"))]
        while sum(thread.name == "cacheblend-stream" for thread in threading.enumerate()) < 9:
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 20) == "free"
    finally:
        held.go_on.set()
    assert len({text_of(answer) for answer in await asyncio.gather(*tasks)}) == 1
    assert stream.result().token_ids


@KINDS
async def test_a_cancelled_stream_frees_the_engine(kind: Kind, engine: BlendEngine) -> None:
    engine.add([Chunk("A stored text of some length.", "a")])
    llm = kind(engine=engine, max_tokens=1900)
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in llm.astream("A stored text of some length.\nWho?"):
            begun.set()

    # One that is answered, and one that waits for the model.
    tasks = [asyncio.create_task(read()), asyncio.create_task(read())]
    await begun.wait()
    for task in tasks:
        task.cancel()
    for task in tasks:
        with pytest.raises(asyncio.CancelledError):
            await task
    assert text_of(await llm.ainvoke("Who?", max_tokens=1))
    deadline = time.monotonic() + 20
    while any(thread.name == "cacheblend-stream" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a stream that nobody reads goes on"
        await asyncio.sleep(0.02)
