"""Bad input gets its own clear error, or a stated fallback, and loses nothing."""

import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_lab.families import tiny_config
from cacheblend_lab.families import tiny_model as random_model
from cacheblend_lab.settings import blend_settings, engine_settings
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk, ChunkRef, FixedText
from cacheblend_rag.errors import (
    CacheBlendError,
    ConfigError,
    EmptyChunkError,
    PromptError,
    PromptTooLongError,
    UnknownChunkError,
    UnsupportedModelError,
)
from cacheblend_rag.model.checkpoint import model_folder
from cacheblend_rag.store import KVStore, open_store
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words

GOOD = Chunk(words(12, 1), "good")
OPTIONS = dict(num_beams=2, num_return_sequences=3, use_cache=False, prefill_chunk_size=4, prompt_lookup_num_tokens=2)

Case = Callable[[Any], object]


def engine_on(engine: BlendEngine, **settings: Any) -> BlendEngine:
    return BlendEngine(engine.model, engine.tokenizer, **engine_settings(**settings))


def ask(chunk: Any = GOOD) -> BlendPrompt:
    return BlendPrompt("t5", [chunk], "t6")


def blend(**values: Any) -> Case:
    return lambda _: blend_settings(BlendConfig(), **values)


def generate(**options: Any) -> Case:
    return lambda engine: engine.generate(ask(), 4, **options)


FIXED = dict(preamble="t5", dtype="float16", ram_bytes=1, strict=True, remote="memory://two?token=hunter3")


def made_with(name: str) -> Case:
    return lambda _: BlendConfig(**{name: FIXED[name]})


REFUSED: list[tuple[type[CacheBlendError], str, Case]] = [
    (UnknownChunkError, r"no chunk has the id 'nowhere'.*add it", lambda engine: engine.prefill(ask("nowhere"))),
    (ConfigError, "skip_unknown", lambda _: BlendPrompt(segments=["t5"], positions=[0], skip_unknown=True)),
    (ConfigError, "either segments, or prefix", lambda _: BlendPrompt("t5", segments=["t6"])),
    (ConfigError, "1 positions for 2 segments", lambda _: BlendPrompt(segments=["t5", "t6"], positions=[0])),
    (ConfigError, "negative", lambda _: BlendPrompt(segments=["t5"], positions=[-1])),
    (ConfigError, "fixed text", lambda _: FixedText(5)),  # type: ignore[arg-type]
    (ConfigError, "give a list", lambda _: BlendPrompt("t5", chunks="n1")),
    (ConfigError, "segments is the string 'Hello world'", lambda _: BlendPrompt(segments="Hello world")),
    (ConfigError, "segments holds 1, a int", lambda _: BlendPrompt(segments=[1, 2])),  # type: ignore[list-item]
    (ConfigError, "a int; give ids, Chunk or ChunkRef", lambda _: ask(1)),
    (ConfigError, "the prompt is a str; give a BlendPrompt", lambda engine: engine.generate("a question")),
    (PromptError, "token 97 is none of the 97", lambda engine: engine.prefill(BlendPrompt(segments=[[1, 97], "t5"]))),
    (PromptError, "token -1 is none", lambda engine: engine.add([Chunk("t5", "a", token_ids=[3, -1])])),
    (PromptError, "token 99999 is none", lambda engine: engine_on(engine, preamble=(99999,))),
    (PromptError, "whole numbers", lambda engine: engine.prefill(BlendPrompt(segments=[[1, 2.5], "t5"]))),  # type: ignore[list-item]
    (EmptyChunkError, "'x' has no text", lambda _: Chunk("", "x")),
    (ConfigError, "empty string", lambda _: Chunk("t5", "")),
    (ConfigError, "a chunk's text and id are strings", lambda _: Chunk("t3", 5)),  # type: ignore[arg-type]
    (ConfigError, "a chunk's text and id are strings", lambda _: Chunk(5, "n1")),  # type: ignore[arg-type]
    (EmptyChunkError, "has no tokens", lambda engine: engine.add([Chunk("   ", "blank")])),
    (ConfigError, "is a str; give Chunk objects", lambda engine: engine.add(["text"])),
    (ConfigError, "a single Chunk", lambda engine: engine.add(Chunk("t3", "n1"))),
    *((ConfigError, "ttl_s=", partial(BlendEngine.add, chunks=[GOOD], ttl_s=ttl)) for ttl in ("60", 0, -1, math.nan)),
    (ConfigError, "ids is the string 'good'; give a list", lambda engine: engine.delete("good")),
    (ConfigError, "ids is the string 'good'; give a list", lambda engine: engine.records("good")),
    (ConfigError, "give a list of ids", lambda engine: engine.prefetch("n0")),
    (PromptTooLongError, r"513 tokens.*512.*split it", lambda engine: engine.add([Chunk(words(513, 1), "long")])),
    *(
        (PromptError, "half of a UTF-16 pair", case)
        for case in (
            lambda engine: engine.add([Chunk("not \ud800 fine", "b")]),
            lambda engine: engine.generate(BlendPrompt("\udc00?"), 1),
            lambda engine: engine.generate(ask(Chunk("not \ud800 fine")), 1),
        )
    ),
    *((ConfigError, "ratio=.*should", blend(recompute_ratio=ratio)) for ratio in (math.nan, math.inf, -0.1, 1.1)),
    (ConfigError, "must be layer indices from 1 on", blend(selector="hkvd", check_layers=(0,))),
    (ConfigError, "at least one", blend(selector="hkvd", check_layers=())),
    (ConfigError, "ascending", blend(selector="hkvd", check_layers=(3, 2))),
    (ConfigError, "from 1 on", blend(selector="hkvd", check_layers=(-1,))),
    (ConfigError, "unknown setting recompute_ration, .*; BlendConfig has", blend(recompute_ration=0.2)),
    (ConfigError, "deviation='norm'", blend(selector="hkvd", deviation="norm")),
    (ConfigError, "a finite number from 1 on", blend(selector="hkvd", gradual_start=0.5)),
    *((ConfigError, f"{name} is fixed when an engine is made; give it in EngineC", made_with(name)) for name in FIXED),
    *((ConfigError, name, partial(BlendEngine.stream, prompt=ask(), **{name: OPTIONS[name]})) for name in OPTIONS),
    *((ConfigError, name, generate(**{name: OPTIONS[name]})) for name in OPTIONS),
    (ConfigError, "recompute_ratio: not options of generate but of BlendConfig", generate(recompute_ratio=0.2)),
    (ConfigError, "unknown option tempreature of generate, did you mean temperature", generate(tempreature=1.0)),
    (ConfigError, "tennant, did you mean tenant", lambda _: BlendEngine.from_pretrained("reference", tennant="a")),
    (
        ConfigError,
        r"recompute_ratio=0\.2 is a setting, not an option of the model.*BlendConfig",
        lambda _: BlendEngine.from_pretrained("reference", selector="hkvd", recompute_ratio=0.2),
    ),
]


@pytest.fixture(scope="module")
def refusing() -> Iterator[BlendEngine]:
    with BlendEngine(tiny_model("llama"), tiny_tokenizer()) as engine:
        yield engine


@pytest.mark.parametrize(("error", "said", "case"), REFUSED, ids=[said for _, said, _ in REFUSED])
def test_what_is_refused(refusing: BlendEngine, error: type[CacheBlendError], said: str, case: Case) -> None:
    with pytest.raises(error, match=said) as raised:
        case(refusing)
    assert "\\n" not in str(raised.value)
    # No password is shown, and of what was refused nothing is kept.
    assert "hunter" not in str(raised.value)
    assert refusing.ids() == []


def test_unknown_ids_may_be_left_out(make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chunks = [Chunk(words(12, seed), f"n{seed}") for seed in range(4)]
    ids = [chunk.id for chunk in chunks if chunk.id is not None]
    engine, other = make_engine(tmp_path), make_engine(tmp_path)
    for gone in chain.from_iterable(combinations(ids, count) for count in range(5)):
        engine.add(chunks)
        other.delete(gone)
        there = [id for id in ids if id not in gone]
        prompts = [
            (
                BlendPrompt("t5", ids, "t6", separator="t7", skip_unknown=True),
                BlendPrompt("t5", there, "t6", separator="t7"),
            ),
            (
                BlendPrompt(segments=["t5", *map(ChunkRef, ids), "t6"], skip_unknown=True),
                BlendPrompt(segments=["t5", *map(ChunkRef, there), "t6"]),
            ),
        ]
        for prompt, wanted in prompts:
            caplog.clear()
            counted = left_out(engine)
            answer, right = engine.generate(prompt, 3), engine.generate(wanted, 3)
            assert engine.prompt_ids(prompt) == engine.prompt_ids(wanted)
            assert answer.token_ids == right.token_ids
            report = answer.report
            assert [chunk.id for chunk in report.chunks] == [*there, *gone]
            counts = (report.hits, report.misses, report.context_tokens)
            assert counts == (len(there), 0, right.report.context_tokens)
            assert all("left out" in (chunk.reason or "") for chunk in report.chunks[len(there) :])
            assert ("left out" in caplog.text) == bool(gone)
            assert left_out(engine) - counted >= len(gone)
            if gone:
                with pytest.raises(UnknownChunkError):
                    engine.generate(BlendPrompt(segments=prompt.segments), 3)


def left_out(engine: BlendEngine) -> float:
    return engine.metrics.registry.get_sample_value("cacheblend_chunks_total", {"tier": "left out"}) or 0


@pytest.mark.parametrize("call", ["prefill", "generate", "stream"])
def test_a_prompt_beyond_the_window(engine: BlendEngine, call: str) -> None:
    engine.add([Chunk(words(300, 1), "a"), Chunk(words(300, 2), "b")])
    with pytest.raises(PromptTooLongError, match=r"603 tokens.*window is 512.*fewer or shorter"):
        getattr(engine, call)(BlendPrompt("t5", ["a", "b"], "t6"))
    with pytest.raises(PromptTooLongError, match=r"window is 512.*shorten the text$"):
        getattr(engine, call)(BlendPrompt(words(600, 3)))


def test_the_answer_ends_where_the_window_ends(engine: BlendEngine) -> None:
    engine.add([Chunk(words(380, 1), "a"), Chunk(words(120, 2), "b")])
    answer = engine.generate(BlendPrompt("t5", ["a", "b"], "t6"), 100, eos_token_id=-1, do_sample=False)
    assert len(answer.prompt_ids) + len(answer.token_ids) == 512


def test_an_engine_that_cannot_be_made_leaves_no_store_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[KVStore] = []
    close = KVStore.close
    monkeypatch.setattr(KVStore, "close", lambda store: (closed.append(store), close(store)))
    with pytest.raises(PromptError, match="half of a UTF-16 pair"):
        BlendEngine(tiny_model("llama"), tiny_tokenizer(), **engine_settings(preamble="\ud800"), store=tmp_path)
    assert len(closed) == 1
    own = open_store(tmp_path, ram_bytes=1 << 20)
    with pytest.raises(PromptError):
        BlendEngine(tiny_model("llama"), tiny_tokenizer(), **engine_settings(preamble="\ud800"), store=own)
    # What was handed in is closed by whom it belongs to.
    assert len(closed) == 1
    own.close()


def test_too_long(engine: BlendEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    window = engine.window
    assert window is not None
    monkeypatch.setattr(engine.tokenizer, "model_max_length", window)
    monkeypatch.setattr(engine.tokenizer, "deprecation_warnings", {})
    # transformers keeps its messages to itself.
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with pytest.raises(PromptTooLongError, match="split it"):
        engine.add([Chunk(words(window + 1, 0), "x")])
    assert not caplog.text


def test_an_empty_prompt(engine: BlendEngine) -> None:
    no_bos = tiny_tokenizer()
    no_bos.bos_token = None
    with BlendEngine(tiny_model("llama"), no_bos) as bare, pytest.raises(PromptError, match="no tokens"):
        bare.prefill(BlendPrompt(""))


def test_settings_that_do_not_fit_the_model(engine: BlendEngine) -> None:
    for changes, message in (
        ({"selector": "hkvd", "check_layers": (6,)}, "beyond the model's last layer; choose from 1 to 5"),
        ({"selector": "best"}, "unknown selector 'best'.*; choose one of a3, boundary"),
        ({"selector": "query(repair=0.1)"}, "no option 'repair'; attach Repair of cacheblend_attachments"),
        ({"selector": "hkvd", "check_layers": (1, 2), "gradual_start": 6.0}, "leaves nothing for the last"),
        ({"selector": "query", "look_layers": (2, 5)}, "look_layers=.*must end before the model's last layer, 5"),
        ({"selector": "query", "stop_layer": 7}, "stop_layer=7 is beyond the model's 6 layers"),
    ):
        config = blend_settings(BlendConfig(), **changes)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=message):
            BlendEngine(engine.model, engine.tokenizer, blend=config)
        with pytest.raises(ConfigError, match=message):
            engine.prefill(ask(), blend=config)


def test_a_closed_engine(engine: BlendEngine) -> None:
    engine.close()
    engine.close()
    with pytest.raises(ConfigError, match="closed"):
        engine.prefill(ask())


_UNBLENDABLE = {
    "roberta": "positions from 0 on",
    "gpt_neo": "than the model itself",
    "mamba": "keep no KV for each token",
    "qwen3_next": "linear_attention",
    "xlm": "passes no KV to the cache",
    "flex": "attn_implementation='sdpa'",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", _UNBLENDABLE)
def test_a_model_that_cannot_be_blended(case: str, caplog: pytest.LogCaptureFixture) -> None:
    reason = _UNBLENDABLE[case]
    if case == "flex":
        model = tiny_model("llama")
        model.config._attn_implementation = "flex_attention"
    else:
        model = random_model(tiny_config(case))
    with pytest.raises(UnsupportedModelError, match=reason):
        BlendEngine(model, tiny_tokenizer(), **engine_settings(strict=True))
    with caplog.at_level(logging.WARNING, logger="cacheblend_rag"):
        engine = BlendEngine(model, tiny_tokenizer())
    assert any(reason in record.message for record in caplog.records)
    assert engine.unsupported_reason is not None
    if case == "flex":
        model.config._attn_implementation = "sdpa"
    # Its prompts are answered all the same, by id as well.
    engine.add([GOOD])
    assert engine.contains("good")
    ids = torch.tensor([engine.prompt_ids(ask("good"))])
    answer = engine.generate(ask("good"), 4, do_sample=False)
    with torch.no_grad():
        wanted = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    assert answer.token_ids == tuple(wanted[0, ids.shape[1] :].tolist())
    assert str(answer.report.fallback_reason).startswith(engine.unsupported_reason)
    assert answer.report.selector == "full"


def test_a_whole_prefill_says_why(engine: BlendEngine) -> None:
    for chunks, enabled, reason in (([], True, "the prompt has no chunks"), ([GOOD], False, None)):
        report = engine.prefill(BlendPrompt("t5", chunks, "t6"), blend=engine.blend.replace(enabled=enabled)).report
        assert (report.selector, report.fallback_reason) == ("full", reason)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("thread_pays_bytes", [0, 1 << 20], ids=["ahead", "when-asked"])
def test_damaged_kv_is_a_miss_and_is_replaced(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, thread_pays_bytes: int
) -> None:
    monkeypatch.setattr("cacheblend_rag.loader.layers._THREAD_PAYS_BYTES", thread_pays_bytes)
    model = tiny_model("llama")
    prompt = BlendPrompt("t5", [Chunk(words(20, 1), "a"), Chunk(words(30, 2), "b")], "t6")
    engine = make_engine(tmp_path / "kv", model=model, ram_bytes=0, selector="hkvd")
    engine.add([chunk for chunk in prompt.segments if isinstance(chunk, Chunk)])
    wanted = engine.prefill(prompt)
    assert wanted.report.hits == 2
    path = max((tmp_path / "kv").rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    # The last layer, which is read when the blended pass is nearly over.
    content[-5] ^= 0x10
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[:-100])
    for attempt in range(2):
        got = engine.prefill(prompt)
        assert (got.logits - wanted.logits).abs().max() < 1e-4
        assert (got.report.hits, got.report.misses) == ((2, 0) if attempt else (1, 1))
        [reason] = {chunk.reason for chunk in got.report.chunks if not chunk.hit} or {None}
        assert reason == (None if attempt else "its stored KV could not be read")
    path.write_bytes(content[: len(content) // 2])
    answer = engine.generate(prompt, 5, do_sample=False)
    assert answer.token_ids == engine.generate(prompt, 5, do_sample=False).token_ids


def test_every_error_is_in_the_tree() -> None:
    from cacheblend_rag import errors

    for name in errors.__all__:
        assert issubclass(getattr(errors, name), CacheBlendError)
        assert f" {name} " in (errors.__doc__ or "") or name == "CacheBlendError"


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    for name in (tmp_path / "nothing", Path("nothing"), str(tmp_path / "nothing"), "./nothing", "~/nothing"):
        with pytest.raises(ConfigError, match=r"nothing cannot be loaded: there is no such folder, and no"):
            BlendEngine.from_pretrained(name)
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*"):
        BlendEngine.from_pretrained(tmp_path)


def test_a_model_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.safetensors", "b.gguf", "C.GGUF"):
        Path(name).write_bytes(b"no weights")
    for name in ("a.safetensors", "./a.safetensors"):
        with pytest.raises(ConfigError, match="it is a file, but not a GGUF file"):
            BlendEngine.from_pretrained(name)
    for name in ("b.gguf", "./b.gguf", "C.GGUF"):
        with pytest.raises(ConfigError, match="GGUF"):
            BlendEngine.from_pretrained(name)
    with pytest.raises(ConfigError, match=r"b.gguf is a GGUF file, but a folder"):
        model_folder("b.gguf")


def test_a_device_that_is_not_there() -> None:
    # Neither without CUDA nor with it.
    for device in ("cuda:99", "xpu:99"):
        with pytest.raises(ConfigError, match=f"device='{device}' cannot be used: .*leave device out"):
            BlendEngine.from_pretrained("reference", **engine_settings(device=device))


def test_settings_that_are_none(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"recompute_ratio": 0.3}
    asked = (
        lambda: BlendEngine(engine.model, engine.tokenizer, config=settings),  # type: ignore[arg-type]
        lambda: BlendEngine.from_pretrained("reference", config=settings),  # type: ignore[arg-type]
        lambda: engine.prefill(ask(), blend=settings),  # type: ignore[arg-type]
    )
    for call in asked:
        with pytest.raises(ConfigError, match=r"expected (Engine|Blend)Config, not the dict"):
            call()

    def load(*args: object) -> None:
        raise AssertionError("the model was loaded")

    # A wrong name is said before the model is loaded for nothing.
    monkeypatch.setattr("cacheblend_rag.engine.engine.load_pretrained", load)
    with pytest.raises(ConfigError, match="unknown selector 'hkdv', did you mean hkvd"):
        BlendEngine.from_pretrained("reference", **engine_settings(selector="hkdv"))


def test_an_argument_that_is_none_is_not_taken_for_the_mask(engine: BlendEngine) -> None:
    engine.add([GOOD, Chunk(words(20, 5), "other")])
    prompt = BlendPrompt("t5", ["good", "other"], "t6 t7 t8")
    wanted = engine.prefill(prompt).logits

    def with_none(module: object, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, {"unused": None} | kwargs

    hooks = [layer.register_forward_pre_hook(with_none, with_kwargs=True) for layer in engine.model.model.layers]
    try:
        assert torch.equal(engine.prefill(prompt).logits, wanted)
    finally:
        for hook in hooks:
            hook.remove()


def test_what_would_be_refused_is_said_chunk_by_chunk(engine: BlendEngine) -> None:
    window = engine.window
    assert window is not None
    chunks = [Chunk(words(5, seed=0), "good"), Chunk(words(window + 1, seed=1), "long")]
    engine.add([Chunk("t3", "long")])
    with pytest.raises(PromptTooLongError) as raised:
        engine.add(chunks)
    # What an error is raised of is left as it was.
    assert sorted(engine.ids()) == ["good", "long"]
    refused: list[tuple[str | None, str]] = []
    for background in (False, True):
        engine.add(chunks, on_refused=lambda each, error: refused.append((each.id, str(error))), background=background)
    assert refused == [("long", str(raised.value))] * 2
    assert engine.ids() == ["good"]
