"""How models are run: caches, tracing, events, time limits, cancellation, being written down."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.load import dumpd, load
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from transformers import LlamaForCausalLM

from cacheblend_lab.settings import settings_of
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk, EngineConfig
from cacheblend_rag.errors import AnswerTimeoutError, ConfigError
from integrations.langchain.tests.asking import KINDS, Kind, text_of
from langchain_cacheblend import BlendLLM
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


@KINDS
def test_fields_can_be_configured_but_for_the_model(kind: Kind, engine: BlendEngine) -> None:
    llm = kind(engine=engine, max_tokens=TOKENS, temperature=0)
    configurable = llm.configurable_fields(
        max_tokens=ConfigurableField(id="tokens"), model=ConfigurableField(id="model")
    )
    assert text_of(configurable.invoke("Who?")) == text_of(llm.invoke("Who?", model=engine.model_name))
    short = configurable.with_config(configurable={"tokens": 2}).invoke("Who?")
    assert len(text_of(short)) < len(text_of(configurable.invoke("Who?")))
    chosen = llm.configurable_alternatives(ConfigurableField(id="which"), other=kind(engine=engine, max_tokens=2))
    assert text_of(chosen.with_config(configurable={"which": "other"}).invoke("Who?")) == text_of(short)
    wrong: list[Callable[[], Any]] = [
        lambda: configurable.with_config(configurable={"tokens": 0}).invoke("Who?"),
        lambda: configurable.with_config(configurable={"model": "another"}).invoke("Who?"),
        lambda: kind(engine=engine, model="another"),
        lambda: llm.invoke("Who?", model="another"),
    ]
    for make in wrong:
        with pytest.raises(ConfigError):
            make()


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
    options["model_kwargs"] = {"dtype": "bfloat16"}
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
    assert dumpd(kind(engine=llm.engine))["type"] == "not_implemented"
    for each in (llm, again):
        each.engine.close()


# Events, time and cancellation


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.seen.append(token)


@KINDS
async def test_events_and_callbacks_tell_of_a_stream(kind: Kind, engine: BlendEngine) -> None:
    chain = ChatPromptTemplate.from_template("{question}") | kind(engine=engine, max_tokens=TOKENS)
    events = [event async for event in chain.astream_events({"question": "Who?"}, version="v2")]
    word = "llm" if kind is BlendLLM else "chat_model"
    names = [event["event"] for event in events if word in event["event"]]
    assert [names[0], names[-1], *{*names[1:-1]}] == [f"on_{word}_start", f"on_{word}_end", f"on_{word}_stream"]
    assert len(names) > 3
    pieces = [event["data"]["chunk"] for event in events if event["event"] == f"on_{word}_stream"]
    streamed = "".join(text_of(piece) for piece in pieces)
    assert streamed == text_of(await chain.ainvoke({"question": "Who?"}))
    tokens = Tokens()
    pieces = [text_of(piece) for piece in chain.stream({"question": "Who?"}, {"callbacks": [tokens]})]
    assert "".join(pieces) == "".join(tokens.seen) == streamed and len(pieces) > 2


@KINDS
async def test_a_call_that_takes_or_waits_too_long_is_given_up(kind: Kind, engine: BlendEngine) -> None:
    llm = kind(engine=engine, max_tokens=1500, timeout=0.05)
    asks: list[Callable[[], Any]] = [
        lambda: llm.invoke("Who?"),
        lambda: list(llm.stream("Who?")),
        lambda: llm.batch(["Who?", "Why?"]),
    ]
    for ask in asks:
        with pytest.raises(AnswerTimeoutError):
            ask()
    held = Held()
    stream = engine.stream(BlendPrompt("A question"), 4, stopping_criteria=[held])
    held.begun.wait(60)
    try:
        for ask in asks:
            with pytest.raises(AnswerTimeoutError, match="busy"):
                ask()
        with pytest.raises(AnswerTimeoutError, match="busy"):
            await llm.ainvoke("Who?")
    finally:
        held.go_on.set()
    assert stream.result().token_ids
    assert text_of(llm.invoke("Who?", timeout=60, max_tokens=2))


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
