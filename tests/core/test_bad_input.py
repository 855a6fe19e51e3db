"""Bad input gets its own error, or a stated fallback, and loses nothing."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_lab.families import tiny_config
from cacheblend_lab.families import tiny_model as random_model
from cacheblend_lab.settings import blend_settings, engine_settings
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk, ChunkRef, EngineConfig, FixedText, errors
from cacheblend_rag.errors import (
    CacheBlendError,
    ConfigError,
    EmptyChunkError,
    PromptError,
    PromptTooLongError,
    UnknownChunkError,
    UnsupportedModelError,
)
from cacheblend_rag.selection import make_selector
from cacheblend_rag.store import open_store
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words
from tests.store.kit import damage

GOOD = Chunk(words(12, 1), "good")
OPTIONS = dict(num_beams=2, num_return_sequences=3, use_cache=False, prefill_chunk_size=4, prompt_lookup_num_tokens=2)
OPTIONS |= dict(penalty_alpha=0.6, dola_layers="high", seed="x")
FIXED = dict(preamble="t5", dtype="float16", ram_bytes=1, strict=True, remote="memory://two?token=hunter3")

Case = Callable[[Any], object]


def engine_on(engine: BlendEngine, **settings: Any) -> BlendEngine:
    return BlendEngine(engine.model, engine.tokenizer, **engine_settings(**settings))


def ask(chunk: Any = GOOD) -> BlendPrompt:
    return BlendPrompt("t5", [chunk], "t6")


def blend(**values: Any) -> Case:
    return lambda _: blend_settings(BlendConfig(), **values)


def selecting(**values: Any) -> Case:
    return lambda _: make_selector(blend_settings(BlendConfig(), **values).selector)


def fitted(**values: Any) -> Case:
    """Settings that are sound, but do not fit the model: refused for one call as for all."""

    def case(engine: BlendEngine) -> None:
        config = blend_settings(BlendConfig(), **values)
        with pytest.raises(ConfigError):
            BlendEngine(engine.model, engine.tokenizer, blend=config)
        engine.prefill(ask(), blend=config)

    return case


# The error, a word that its message has, and what raises it.
REFUSED: list[tuple[type[CacheBlendError], str, Case]] = [
    (UnknownChunkError, "nowhere", lambda engine: engine.prefill(ask("nowhere"))),
    (ConfigError, "skip_unknown", lambda _: BlendPrompt(segments=["t5"], positions=[0], skip_unknown=True)),
    (ConfigError, "prefix", lambda _: BlendPrompt("t5", segments=["t6"])),
    (ConfigError, "positions", lambda _: BlendPrompt(segments=["t5", "t6"], positions=[0])),
    (ConfigError, "negative", lambda _: BlendPrompt(segments=["t5"], positions=[-1])),
    (ConfigError, "text", lambda _: FixedText(5)),  # type: ignore[arg-type]
    (ConfigError, "list", lambda _: BlendPrompt("t5", chunks="n1")),
    (ConfigError, "Hello", lambda _: BlendPrompt(segments="Hello world")),
    (ConfigError, "int", lambda _: BlendPrompt(segments=[1, 2])),  # type: ignore[list-item]
    (ConfigError, "ChunkRef", lambda _: ask(1)),
    (ConfigError, "BlendPrompt", lambda engine: engine.generate("a question")),
    (PromptError, "97", lambda engine: engine.prefill(BlendPrompt(segments=[[1, 97], "t5"]))),
    (PromptError, "-1", lambda engine: engine.add([Chunk("t5", "a", token_ids=[3, -1])])),
    (PromptError, "99999", lambda engine: engine_on(engine, preamble=(99999,))),
    (PromptError, "whole", lambda engine: engine.prefill(BlendPrompt(segments=[[1, 2.5], "t5"]))),  # type: ignore[list-item]
    (EmptyChunkError, "x", lambda _: Chunk("", "x")),
    (ConfigError, "empty", lambda _: Chunk("t5", "")),
    (ConfigError, "strings", lambda _: Chunk("t3", 5)),  # type: ignore[arg-type]
    (ConfigError, "strings", lambda _: Chunk(5, "n1")),  # type: ignore[arg-type]
    (EmptyChunkError, "tokens", lambda engine: engine.add([Chunk("   ", "blank")])),
    (ConfigError, "Chunk", lambda engine: engine.add(["text"])),
    (ConfigError, "Chunk", lambda engine: engine.add(Chunk("t3", "n1"))),
    (ConfigError, "no id", lambda engine: engine.add([GOOD, Chunk("t3")])),
    (ConfigError, "list", lambda engine: engine.delete("good")),
    (ConfigError, "list", lambda engine: engine.records("good")),
    (ConfigError, "list", lambda engine: engine.prefetch("n0")),
    (PromptTooLongError, "512", lambda engine: engine.add([Chunk(words(513, 1), "long")])),
    *(
        (PromptTooLongError, "512", lambda engine, prompt=prompt, call=call: getattr(engine, call)(prompt))
        for prompt in (ask(Chunk(words(511, 1))), BlendPrompt(words(600, 3)))
        for call in ("prefill", "generate", "stream")
    ),
    (PromptError, "UTF-16", lambda engine: engine.add([Chunk("not \ud800 fine", "b")])),
    (PromptError, "UTF-16", lambda engine: engine.generate(BlendPrompt("\udc00?"), 1)),
    (PromptError, "UTF-16", lambda engine: engine.generate(ask(Chunk("not \ud800 fine")), 1)),
    *((ConfigError, "ratio", blend(recompute_ratio=ratio)) for ratio in (math.nan, math.inf, -0.1, 1.1)),
    *((ConfigError, "check_layers", blend(selector="hkvd", check_layers=each)) for each in ((0,), (), (3, 2), (-1,))),
    (ConfigError, "device", lambda _: EngineConfig(device="gpu")),
    (ConfigError, "ram_bytes", lambda _: EngineConfig(ram_bytes=-1)),
    (ConfigError, "companions", lambda _: EngineConfig(companions="all")),  # type: ignore[arg-type]
    *(
        (ConfigError, "tenant", lambda engine, name=name: engine.for_tenant(name))
        for name in ("", "a" * 201, "a\nb", "a\0", "\ud800", 7)
    ),
    (ConfigError, "seed", selecting(selector="random", seed=2**70)),
    (ConfigError, "gradual_start", selecting(selector="hkvd", gradual_start=math.inf)),
    (ConfigError, "selector", selecting(selector="hkvd(1,2)")),
    (ConfigError, "recompute_ration", blend(recompute_ration=0.2)),
    (ConfigError, "deviation", blend(selector="hkvd", deviation="norm")),
    (ConfigError, "gradual_start", blend(selector="hkvd", gradual_start=0.5)),
    *((ConfigError, name, lambda _, name=name: BlendConfig(**{name: FIXED[name]})) for name in FIXED),
    *(
        (ConfigError, name, partial(call, prompt=ask(), **{name: value}))
        for name, value in OPTIONS.items()
        for call in (BlendEngine.stream, BlendEngine.generate)
    ),
    (ConfigError, "BlendConfig", lambda engine: engine.generate(ask(), recompute_ratio=0.2)),
    (ConfigError, "temperature", lambda engine: engine.generate(ask(), tempreature=1.0)),
    *((PromptError, "logits_to_keep", partial(BlendEngine.prefill, prompt=ask(), logits_to_keep=n)) for n in (0, 2)),
    # Many prompts, of which one cannot be served, or no list.
    (PromptTooLongError, "512", lambda engine: engine.generate_many([ask(), BlendPrompt(words(600, 3))], 4)),
    (ConfigError, "list", lambda engine: engine.generate_many(ask())),
    *(
        (ConfigError, next(iter(options)), partial(BlendEngine.generate_many, prompts=[ask(), ask()], **options))
        for options in ({"batch_size": 0}, {"streamer": object()}, {"stopping_criteria": [[]]})
    ),
    (ConfigError, "6", fitted(selector="hkvd", check_layers=(6,))),
    (ConfigError, "best", fitted(selector="best")),
    (ConfigError, "depth", fitted(selector="hkvd(depth=1)")),
    (ConfigError, "last", fitted(selector="hkvd", check_layers=(1, 2), gradual_start=6.0)),
    (ConfigError, "dict", lambda engine: BlendEngine(engine.model, engine.tokenizer, config={"ram_bytes": 3})),  # type: ignore[arg-type]
    (ConfigError, "dict", lambda engine: engine.prefill(ask(), blend={"recompute_ratio": 0.3})),  # type: ignore[arg-type]
    (ConfigError, "store", lambda engine: BlendEngine(engine.model, engine.tokenizer, store=engine.store)),  # type: ignore[arg-type]
    # What is asked of a model that has yet to be loaded.
    (TypeError, "tennant", lambda _: BlendEngine.from_pretrained("reference", tennant="a")),
    (ConfigError, "BlendConfig", lambda _: BlendEngine.from_pretrained("reference", recompute_ratio=0.2)),
    (ConfigError, "hkvd", lambda _: BlendEngine.from_pretrained("reference", blend=BlendConfig(selector="hkdv"))),
    (ConfigError, "cuda:99", lambda _: BlendEngine.from_pretrained("reference", **engine_settings(device="cuda:99"))),
    *((ConfigError, "nothing", lambda _, n=n: BlendEngine.from_pretrained(n)) for n in (Path("nothing"), "./nothing")),
]


@pytest.fixture(scope="module")
def refusing() -> Iterator[BlendEngine]:
    with BlendEngine(tiny_model("llama"), tiny_tokenizer()) as engine:
        yield engine


@pytest.mark.parametrize(("error", "said", "case"), REFUSED)
def test_what_is_refused(refusing: BlendEngine, error: type[Exception], said: str, case: Case) -> None:
    with pytest.raises(error, match=said) as raised:
        case(refusing)
    # No password is shown, and of what was refused nothing is kept.
    assert "hunter" not in str(raised.value)
    assert refusing.ids() == []


def test_every_error_is_in_the_tree() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), CacheBlendError)


@pytest.mark.parametrize("by_segments", [False, True])
@pytest.mark.parametrize("gone", [{0}, {1, 3}, {0, 1, 2, 3}, set()])
def test_unknown_ids_may_be_left_out(engine: BlendEngine, gone: set[int], by_segments: bool) -> None:
    ids = [f"n{number}" for number in range(4)]
    engine.add([Chunk(words(12, number), id) for number, id in enumerate(ids)])
    engine.delete([ids[number] for number in gone])
    there = [id for number, id in enumerate(ids) if number not in gone]

    def prompt_of(named: list[str], skips: bool) -> BlendPrompt:
        if by_segments:
            return BlendPrompt(segments=["t5", *map(ChunkRef, named), "t6"], skip_unknown=skips)
        return BlendPrompt("t5", named, "t6", separator="t7", skip_unknown=skips)

    answer, wanted = engine.generate(prompt_of(ids, True), 3), engine.generate(prompt_of(there, False), 3)
    assert (answer.prompt_ids, answer.token_ids) == (wanted.prompt_ids, wanted.token_ids)
    assert [chunk.id for chunk in answer.report.chunks] == [*there, *(ids[number] for number in sorted(gone))]
    assert (answer.report.hits, answer.report.misses) == (len(there), 0)
    if gone:
        with pytest.raises(UnknownChunkError):
            engine.generate(prompt_of(ids, False), 3)


def test_a_store_that_was_handed_in_outlives_an_engine_and_one_that_cannot_be_made(tmp_path: Path) -> None:
    store = open_store(tmp_path, ram_bytes=1 << 20)
    with pytest.raises(PromptError):
        BlendEngine(tiny_model("llama"), tiny_tokenizer(), **engine_settings(preamble="\ud800"), store=store)
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), store=store) as engine:
        engine.add([GOOD])
    assert store.stats().entries == 2
    store.close()


def test_an_empty_prompt() -> None:
    no_bos = tiny_tokenizer()
    no_bos.bos_token = None
    with BlendEngine(tiny_model("llama"), no_bos) as bare, pytest.raises(PromptError):
        bare.prefill(BlendPrompt(""))


def test_a_closed_engine(engine: BlendEngine) -> None:
    for _ in range(2):
        engine.close()
    for call in (lambda: engine.prefill(ask()), lambda: engine.prefetch(["n"]), engine.flush):
        with pytest.raises(ConfigError):
            call()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["roberta", "gpt_neo", "mamba", "qwen3_next", "xlm"])
def test_a_model_that_cannot_be_blended(case: str) -> None:
    """Its prompts are answered all the same, by id as well."""
    model = random_model(tiny_config(case))
    with pytest.raises(UnsupportedModelError):
        BlendEngine(model, tiny_tokenizer(), **engine_settings(strict=True))
    engine = BlendEngine(model, tiny_tokenizer())
    assert engine.unsupported_reason is not None
    engine.add([GOOD])
    assert engine.contains("good")
    ids = torch.tensor([engine.prompt_ids(ask("good"))])
    with torch.no_grad():
        wanted = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    answer = engine.generate(ask("good"), 4, do_sample=False)
    assert answer.token_ids == tuple(wanted[0, ids.shape[1] :].tolist())
    assert str(answer.report.fallback_reason).startswith(engine.unsupported_reason)
    assert answer.report.selector == "full"
    many = engine.generate_many([ask("good")] * 2, 4, do_sample=False)
    assert [each.token_ids for each in many] == [answer.token_ids] * 2


@pytest.mark.parametrize("way", ["generate", "stream", "many"])
def test_damaged_kv_is_a_miss_and_is_replaced(make_engine: MakeEngine, tmp_path: Path, way: str) -> None:
    """Its last layer is, which is read when the blended pass is nearly over."""
    chunks = [Chunk(words(20, 1), "a"), Chunk(words(30, 2), "b")]
    prompt = BlendPrompt("t5", chunks, "t6")
    engine = make_engine(tmp_path / "kv", ram_bytes=0, selector="hkvd")
    engine.add(chunks)
    wanted = engine.generate(prompt, 5, do_sample=False).token_ids
    damage(max((tmp_path / "kv").rglob("*.safetensors"), key=lambda file: file.stat().st_size))
    if way == "stream":
        stream = engine.stream(prompt, 5, do_sample=False)
        assert "".join(stream) == stream.result().text
        results = [stream.result()]
    elif way == "generate":
        results = [engine.generate(prompt, 5, do_sample=False)]
    else:
        results = list(engine.generate_many([prompt] * 3, 5, do_sample=False))
    assert all(each.token_ids == wanted for each in results)
    assert (results[0].report.hits, results[0].report.misses) == (1, 1)
    engine.flush()
    assert engine.prefill(prompt).report.hits == 2


def test_what_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("C.GGUF").write_bytes(b"no weights")
    Path("a.safetensors").write_bytes(b"no weights")
    for path in (tmp_path, "C.GGUF", "./C.GGUF", "a.safetensors"):
        with pytest.raises(ConfigError):
            BlendEngine.from_pretrained(path)
