"""How models are run: caches, tracing, events, time limits, cancellation, being written down."""

import asyncio
import inspect
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
    names = ("provider", "model_name", "temperature", "max_tokens", "stop")
    for asked, wanted in (({}, (0.5, 7, ["x"])), ({"stop": ["y"], "temperature": 0.1}, (0.1, 7, ["y"]))):
        params = llm._get_ls_params(**asked)
        assert tuple(params[f"ls_{name}"] for name in names) == ("cacheblend", engine.model_name, *wanted)
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
    short = configurable.with_config(configurable={"tokens": 2}).invoke("Who?")
    assert len(text_of(short)) < len(text_of(configurable.invoke("Who?", model=engine.model_name)))
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
def test_callbacks_are_told_of_a_stream(kind: Kind, engine: BlendEngine) -> None:
    chain = ChatPromptTemplate.from_template("{question}") | kind(engine=engine, max_tokens=TOKENS)
    tokens = Tokens()
    pieces = [text_of(piece) for piece in chain.stream({"question": "Who?"}, {"callbacks": [tokens]})]
    assert "".join(pieces) == "".join(tokens.seen) and len(pieces) > 2


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
