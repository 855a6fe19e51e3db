"""Fixed text that prompts begin with: its KV is kept exactly, and like a chunk's."""

import time
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_attachments import Repair, SnapKV, SourceAttention
from cacheblend_lab import families
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, ChunkRef, FixedText
from cacheblend_rag.errors import ConfigError, StoreReadOnlyError, UnknownChunkError
from cacheblend_rag.store import check_store
from tests.engines import MakeEngine, damage
from tests.families import tiny_model, tiny_tokenizer, words
from tests.store.kit import files_of

TOLERANCE = 1e-4
HEAD = words(20, 70)
HEAD_TOKENS = 1 + 20
CHUNKS = [Chunk(words(12 + number, number), f"c{number}") for number in range(4)]
QUESTION = words(6, 90)

ENGINE = {"strict": True, "self_check": False, "recompute_ratio": 0.0}


def asking(*chunks: Chunk | str, head: str = HEAD, question: str = QUESTION, fixed: bool = True) -> BlendPrompt:
    return BlendPrompt(FixedText(head) if fixed else head, chunks or CHUNKS[:2], question)


@torch.no_grad()
def own_logits(engine: BlendEngine, prompt: BlendPrompt) -> torch.Tensor:
    return engine.model(torch.tensor([engine.prompt_ids(prompt)])).logits[0, -1]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).abs().max()) < TOLERANCE


# What is taken, and what comes of it

SETTINGS: list[dict[str, Any]] = [
    {},
    {"recompute_ratio": 0.3, "selector": "hkvd"},
    {"recompute_ratio": 0.3, "selector": "query"},
    {"recompute_ratio": 0.3, "selector": "a3"},
    {"recompute_ratio": 0.3, "selector": "boundary"},
    {"recompute_ratio": 0.3, "selector": "random"},
    {"recompute_ratio": 1.0},
    {"ram_codec": "int4"},
]


@pytest.mark.parametrize(
    ("family", "values"),
    [
        *(("llama", values) for values in SETTINGS),
        *((family, SETTINGS[1]) for family in ("gemma3", "gemma3n", "gpt-neox", "deepseek-v3", "qwen3-moe")),
    ],
    ids=str,
)
def test_a_head_changes_nothing_but_the_work(make_engine: MakeEngine, family: str, values: dict[str, Any]) -> None:
    engine = make_engine(model=family, **values)
    engine.add(CHUNKS)
    plain = engine.prefill(asking(fixed=False))
    for taken in (0, HEAD_TOKENS):
        result = engine.prefill(asking())
        assert same(result.logits, plain.logits)
        assert result.report.head_tokens == taken
        assert result.token_ids == plain.token_ids
        for figure in ("charged_ratio", "recomputed_tokens", "context_tokens", "hits", "misses", "fallback_reason"):
            assert getattr(result.report, figure) == getattr(plain.report, figure), figure
    assert plain.report.head_tokens == 0
    assert f"{HEAD_TOKENS} tokens of the head reused" in str(result.report)


@pytest.mark.parametrize("family", ["llama", "gemma3n", "gpt-oss", "bloom"])
def test_a_prompt_without_chunks_and_one_computed_as_a_whole(make_engine: MakeEngine, family: str) -> None:
    model = tiny_model(family, "eager") if family in ("gpt-oss", "bloom") else None
    engine = make_engine(model=model or family)
    engine.add(CHUNKS)
    alone = BlendPrompt(segments=[FixedText(HEAD), QUESTION])
    for prompt, config in ((alone, engine.blend), (asking(), engine.blend.replace(recompute_ratio=1.0))):
        engine.prefill(prompt, blend=config)
        result = engine.prefill(prompt, blend=config)
        assert result.report.head_tokens == HEAD_TOKENS
        assert result.report.selector == "full"
        assert same(result.logits, own_logits(engine, prompt))


def test_switched_off_everything_is_computed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    off = engine.blend.replace(enabled=False)
    engine.prefill(asking(), blend=off)
    assert engine.heads() == []
    engine.prefill(asking())
    assert len(engine.heads()) == 1
    seen = []
    hook = engine.model.model.layers[-1].mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    result = engine.prefill(asking(), blend=off)
    hook.remove()
    assert seen == [result.report.prompt_tokens]
    assert result.report.head_tokens == 0
    assert same(result.logits, own_logits(engine, asking()))


def test_a_model_that_cannot_be_blended_keeps_nothing(make_engine: MakeEngine) -> None:
    model = families.tiny_model(families.tiny_config("recurrent_gemma"))
    engine = make_engine(model=model, strict=False)
    assert engine.unsupported_reason is not None
    for _ in range(2):
        assert engine.prefill(asking()).report.head_tokens == 0
    assert engine.heads() == []
    assert engine._store.stats().entries == 0


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions(make_engine: MakeEngine, family: str) -> None:
    engine = make_engine(model=families.tiny_model(families.tiny_config(family)))
    assert engine.decoder is not None and not engine.decoder.is_movable
    engine.add(CHUNKS)
    for prompt in (asking(), BlendPrompt(segments=[FixedText(HEAD), QUESTION])):
        for _ in range(2):
            result = engine.prefill(prompt)
            assert same(result.logits, own_logits(engine, prompt))
        assert result.report.head_tokens == HEAD_TOKENS


def test_only_what_stands_first_is_taken(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(CHUNKS)
    fixed = FixedText(HEAD)
    for segments, tokens in (
        ([fixed, ChunkRef("c0"), QUESTION], HEAD_TOKENS),
        # Two in a row are one.
        ([fixed, FixedText(words(5, 71)), ChunkRef("c0"), QUESTION], HEAD_TOKENS + 5),
        ([fixed, QUESTION, fixed, ChunkRef("c0"), QUESTION], HEAD_TOKENS),
        (["t5", fixed, ChunkRef("c0"), QUESTION], 0),
        ([ChunkRef("c0"), fixed, QUESTION], 0),
        ([FixedText(words(6, 5)), ChunkRef("c0"), QUESTION], 0),
        ([FixedText(words(7, 5)), ChunkRef("c0"), QUESTION], 8),
        # The last row is computed.
        ([fixed], HEAD_TOKENS - 1),
        ([fixed, ""], HEAD_TOKENS - 1),
        ([FixedText("")], 0),
        ([FixedText(""), ChunkRef("c0"), QUESTION], 0),
    ):
        prompt = BlendPrompt(segments=segments)
        plain = BlendPrompt(segments=[each.text if isinstance(each, FixedText) else each for each in segments])
        engine.prefill(prompt)
        result = engine.prefill(prompt)
        assert result.report.head_tokens == tokens, segments
        assert result.token_ids == engine.prompt_ids(plain)
        assert same(result.logits, engine.prefill(plain).logits)


def test_a_prompt_with_positions_of_its_own_takes_none(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = BlendPrompt(segments=[FixedText(HEAD), QUESTION], positions=[0, 40])
    for _ in range(2):
        assert engine.prefill(prompt).report.head_tokens == 0
    assert engine.heads() == []


@given(
    parts=st.lists(
        st.tuples(st.sampled_from(["fixed", "text", "chunk"]), st.integers(0, 3), st.integers(0, 14)),
        min_size=1,
        max_size=6,
    ),
    ratio=st.sampled_from([0.0, 0.4, 1.0]),
)
@settings(max_examples=60)
def test_any_prompt_is_what_it_is_without_the_word_fixed(parts: list[tuple[str, int, int]], ratio: float) -> None:
    engine = _shared_engine()
    segments: list[Any] = []
    for kind, seed, length in parts:
        text = words(length, 200 + seed)
        segments.append(FixedText(text) if kind == "fixed" else CHUNKS[seed] if kind == "chunk" else text)
    plain = [each.text if isinstance(each, FixedText) else each for each in segments]
    if not any(engine.prompt_ids(BlendPrompt(segments=plain))):
        return
    config = engine.blend.replace(recompute_ratio=ratio, selector="hkvd")
    wanted = engine.prefill(BlendPrompt(segments=plain), blend=config)
    for _ in range(2):
        found = engine.prefill(BlendPrompt(segments=segments), blend=config)
        assert same(found.logits, wanted.logits)
        assert found.report.charged_ratio == wanted.report.charged_ratio


@cache
def _shared_engine() -> BlendEngine:
    engine = BlendEngine(tiny_model("llama"), tiny_tokenizer(), **engine_settings(self_check=False))
    engine.add(CHUNKS)
    return engine


# What else a prompt may be


def test_streams_many_prompts_eviction_and_repair(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(CHUNKS)
    prompts = [asking(CHUNKS[n], CHUNKS[(n + 1) % 4], question=words(3 + n, 60 + n)) for n in range(4)]
    plain = [asking(CHUNKS[n], CHUNKS[(n + 1) % 4], question=words(3 + n, 60 + n), fixed=False) for n in range(4)]
    wanted = [engine.generate(prompt, 6).token_ids for prompt in plain]
    answers = list(engine.generate_many(prompts, 6))
    assert [answer.token_ids for answer in answers] == wanted
    # Computed for the first of them.
    assert [answer.report.head_tokens for answer in answers].count(0) == 1
    assert len(engine.heads()) == 1
    stream = engine.stream(prompts[0], 6)
    "".join(stream)
    assert stream.result().token_ids == wanted[0]
    assert stream.result().report.head_tokens == HEAD_TOKENS
    for attachment, ratio in ((SnapKV(12), None), (Repair(0.5), 0.1), (SourceAttention(), None)):
        config = engine.blend if ratio is None else engine.blend.replace(recompute_ratio=ratio)
        with closing(engine.attach(attachment)):
            with_head, without = (engine.generate(each[1], 6, blend=config) for each in (prompts, plain))
        assert with_head.token_ids == without.token_ids
        assert with_head.report.head_tokens == HEAD_TOKENS
        for figure in ("evicted_tokens", "kv_bytes", "kv_bytes_before"):
            assert getattr(with_head.report, figure) == getattr(without.report, figure)
        assert with_head.report.repaired_tokens == without.report.repaired_tokens
        attention = [[chunk.attention for chunk in each.report.chunks] for each in (with_head, without)]
        assert attention[0] == pytest.approx(attention[1], abs=1e-4)


def test_an_earlier_prompt_serves_where_it_reaches_further(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_bytes=1 << 28)
    engine.add(CHUNKS)
    first, second, third = (
        engine.generate(asking(*chunks), 5).report for chunks in ((CHUNKS[0],), (CHUNKS[0], CHUNKS[1]), (CHUNKS[2],))
    )
    assert (first.head_tokens, first.prefix_tokens) == (0, 0)
    assert (second.head_tokens, second.prefix_tokens) == (0, HEAD_TOKENS + 12)
    # No further than the head.
    assert (third.head_tokens, third.prefix_tokens) == (HEAD_TOKENS, 0)


# In the store


def test_it_is_there_after_a_restart_and_for_its_tenant_alone(make_engine: MakeEngine, tmp_path: Path) -> None:
    one = make_engine(store=tmp_path, tenant="acme")
    two = make_engine(store=tmp_path, tenant="globex")
    one.prefill(asking())
    one.flush()
    assert two.prefill(asking()).report.head_tokens == 0
    two.flush()
    assert not set(one.heads()) & set(two.heads())
    assert [one._store.stats(tenant).entries for tenant in ("acme", "globex")] == [3, 3]
    one.close()
    again = make_engine(store=tmp_path, tenant="acme")
    result = again.prefill(asking())
    assert result.report.head_tokens == HEAD_TOKENS
    assert same(result.logits, again.prefill(asking(fixed=False)).logits)
    again._store.clear("acme")
    assert again.heads() == []
    assert again.prefill(asking(fixed=False)).report.head_tokens == 0
    assert len(two.heads()) == 1
    assert two.prefill(asking()).report.head_tokens == HEAD_TOKENS
    assert check_store(tmp_path).is_clean


def test_it_is_no_chunk(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(store=tmp_path)
    mark = engine.changes().mark
    engine.prefill(BlendPrompt(segments=[FixedText(HEAD), QUESTION]))
    engine.flush()
    [name] = engine.heads()
    assert engine.ids() == []
    assert engine.changes(mark).names == []
    assert engine.changes().names == []
    with pytest.raises(UnknownChunkError):
        engine.prefill(BlendPrompt("t5", [name], "t6"))
    with pytest.raises(ConfigError, match="reserved for prompt heads; give the chunk another id"):
        engine.add([Chunk("t5", name)])
    # The same tokens as a chunk are another entry.
    engine.add([Chunk(HEAD, "chunk")])
    assert engine._store.stats().entries == 3
    assert engine.contains(name)
    assert engine.delete(["chunk"]) == 1
    assert engine.prefill(asking()).report.head_tokens == HEAD_TOKENS


@pytest.mark.parametrize("waits", [True, False])
def test_deleting_deletes(make_engine: MakeEngine, tmp_path: Path, waits: bool) -> None:
    engine = make_engine(store=tmp_path)
    engine.prefill(BlendPrompt(segments=[FixedText(HEAD), QUESTION]))
    if not waits:
        engine.flush()
    assert engine.delete(engine.heads()) == 1
    engine.flush()
    assert engine.heads() == []
    assert files_of(tmp_path) == []
    assert engine.prefill(asking()).report.head_tokens == 0
    other = make_engine(store=tmp_path)
    engine.flush()
    assert other.prefill(asking()).report.head_tokens == HEAD_TOKENS
    # By another process, which this one notices.
    other.delete(other.heads())
    assert engine.prefill(asking()).report.head_tokens == 0


def test_it_expires(make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(store=tmp_path, ttl_s=100.0)
    engine.prefill(asking())
    engine.flush()
    [record] = engine.records(engine.heads())
    assert record is not None
    [life] = engine._store.lifetimes([record.key])
    assert life is not None and 90 < life <= 100
    store: Any = engine._store
    monkeypatch.setattr(store, "_clock", lambda: time.time() + 101)
    monkeypatch.setattr(store._tiers, "clock", store._clock)
    monkeypatch.setattr(store._tiers.disk, "clock", store._clock)
    assert engine.prefill(asking()).report.head_tokens == 0
    engine.flush()
    assert engine.prefill(asking()).report.head_tokens == HEAD_TOKENS


def test_it_is_evicted_as_chunks_are(make_engine: MakeEngine, tmp_path: Path) -> None:
    one = 6 * 2 * 2 * 8 * 4 * HEAD_TOKENS
    engine = make_engine(store=tmp_path, disk_bytes=4 * one, ram_bytes=0)
    engine.prefill(BlendPrompt(segments=[FixedText(HEAD), QUESTION]))
    engine.flush()
    engine.add([Chunk(words(20, 300 + number), f"n{number}") for number in range(8)])
    assert engine.prefill(asking()).report.head_tokens == 0
    engine.flush()
    assert engine.prefill(asking()).report.head_tokens == HEAD_TOKENS


@pytest.mark.parametrize(
    "tiers", [{"disk_codec": "int4"}, {"ram_codec": "int8"}, {"disk_codec": "int8", "ram_bytes": 0}]
)
def test_no_codec_takes_anything_from_it(make_engine: MakeEngine, tmp_path: Path, tiers: dict[str, Any]) -> None:
    prompt = BlendPrompt(segments=[FixedText(HEAD), QUESTION])
    make_engine(store=tmp_path, **tiers).prefill(prompt)
    make_engine(store=tmp_path, **tiers).flush()
    for _ in range(3):
        # From the file, and from what it leaves in memory.
        engine = make_engine(store=tmp_path, **tiers)
        for _ in range(2):
            result = engine.prefill(prompt)
            assert result.report.head_tokens == HEAD_TOKENS
            assert same(result.logits, own_logits(engine, prompt))
        [record] = engine.records(engine.heads())
        assert record is not None
        reader = engine._store.open(record.key)
        assert reader is not None and (reader.codec, reader.start) == ("exact", 0)


def test_a_damaged_file_is_computed_anew(make_engine: MakeEngine, tmp_path: Path) -> None:
    make_engine(store=tmp_path, ram_bytes=0).prefill(BlendPrompt(segments=[FixedText(HEAD), QUESTION]))
    make_engine(store=tmp_path, ram_bytes=0).flush()
    [file] = files_of(tmp_path)
    damage(file)
    engine = make_engine(store=tmp_path, ram_bytes=0)
    result = engine.prefill(asking())
    assert result.report.head_tokens == 0
    assert same(result.logits, engine.prefill(asking(fixed=False)).logits)
    engine.flush()
    assert engine.prefill(asking()).report.head_tokens == HEAD_TOKENS


def test_where_nothing_can_be_written_it_is_kept_in_memory(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(store=tmp_path)
    engine.add(CHUNKS)

    def refuse(*_: object) -> None:
        raise StoreReadOnlyError("it may not be written")

    monkeypatch.setattr(engine._store._names, "record_met", refuse)
    for taken in (0, HEAD_TOKENS, HEAD_TOKENS):
        assert engine.prefill(asking()).report.head_tokens == taken
    assert sum("kept in the memory of this process" in record.message for record in caplog.records) == 1


def test_nothing_of_a_question_or_history_is_kept(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(store=tmp_path)
    for question in ("t40 t41 t42", "t43 t44 t45"):
        engine.generate(asking(question=question), 4)
    engine.flush()
    records = engine.records([*engine.heads(), *engine.ids()])
    known = {record.token_ids for record in records if record is not None}
    ids = engine.prompt_ids(asking(question=QUESTION))
    assert known == {ids[:HEAD_TOKENS], ids[HEAD_TOKENS:][:12], ids[HEAD_TOKENS + 12 :][:13]}
