"""The engine's door: hits and misses, names, generation, streams and threads."""

import asyncio
import gc
import itertools
import logging
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.errors import AnswerTimeoutError, ConfigError, PromptError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store import open_store
from tests.engines import MakeEngine, damage
from tests.families import tiny_model, tiny_tokenizer, words

TOLERANCE = 1e-4
ENGINE = {"strict": True, "selector": "hkvd", "recompute_ratio": 0.15}
CHUNKS = [Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate((20, 22, 20, 17))]


def _prompt(chunks: list[Chunk], seed: int = 50) -> BlendPrompt:
    return BlendPrompt(words(4, seed), chunks, words(6, seed + 1))


def test_every_pattern_of_hits_and_misses_gives_the_same_logits(engine: BlendEngine) -> None:
    wanted = None
    for pattern in itertools.product([True, False], repeat=4):
        engine._store.clear()
        engine.add([chunk for chunk, hit in zip(CHUNKS, pattern, strict=True) if hit])
        result = engine.prefill(_prompt(CHUNKS))
        assert [chunk.hit for chunk in result.report.chunks] == list(pattern)
        assert (result.report.hits, result.report.misses) == (sum(pattern), 4 - sum(pattern))
        wanted = result.logits if wanted is None else wanted
        assert (result.logits - wanted).abs().max() < TOLERANCE
        again = engine.prefill(_prompt(CHUNKS))
        assert again.report.hits == 4
        assert (again.logits - wanted).abs().max() < TOLERANCE


def test_the_same_chunk_twice_in_one_prompt(engine: BlendEngine) -> None:
    result = engine.prefill(_prompt([CHUNKS[0], CHUNKS[1], CHUNKS[0]]))
    assert (result.report.hits, result.report.misses) == (0, 3)
    # What comes first is read once more behind another.
    assert engine._store.stats().entries == 3
    again = engine.prefill(_prompt([CHUNKS[0], CHUNKS[1], CHUNKS[0]]))
    assert again.report.hits == 3
    assert (again.logits - result.logits).abs().max() < TOLERANCE


def test_adding_the_same_does_nothing_and_another_text_replaces(engine: BlendEngine) -> None:
    first = engine.add(CHUNKS)
    assert (first.encoded, first.named, first.unchanged, first.tokens) == (4, 4, 0, 79)
    assert engine.add(CHUNKS).encoded == 0
    old = engine.records(["n0"])[0]
    assert old is not None
    changed = engine.add([Chunk(words(9, 99), "n0")])
    assert (changed.encoded, changed.tokens) == (1, 9)
    assert engine._store.holds([old.key]) == [False]
    assert sorted(engine.ids()) == ["n0", "n1", "n2", "n3"]


def test_two_names_of_one_text_share_its_kv_until_the_last_is_deleted(engine: BlendEngine) -> None:
    assert engine.add([Chunk(CHUNKS[0].text, "a"), Chunk(CHUNKS[0].text, "b")]).encoded == 1
    assert engine.add([Chunk(CHUNKS[0].text, "c")]).encoded == 0
    assert engine.delete(["c"]) == 1
    record = engine.records(["a"])[0]
    assert record is not None
    assert engine._store.stats().entries == 2
    assert engine.delete(["a", "unknown"]) == 1
    assert engine._store.holds([record.key]) == [True]
    assert engine.delete(["b"]) == 1
    assert engine._store.holds([record.key]) == [False]
    assert not engine.contains("b")


def test_another_text_under_a_known_id_is_not_served_from_its_kv(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    edited = Chunk(words(21, 77), "n1")
    result = engine.prefill(_prompt([CHUNKS[0], edited, CHUNKS[2]]))
    assert [chunk.hit for chunk in result.report.chunks] == [True, False, True]
    assert result.report.chunks[1].reason == "its text is not the text that was added under this id"
    anonymous = engine.prefill(_prompt([CHUNKS[0], Chunk(edited.text), CHUNKS[2]]))
    assert (anonymous.logits - result.logits).abs().max() < TOLERANCE
    # The name still means what was added.
    assert engine.prefill(_prompt([CHUNKS[1]])).report.hits == 1


def test_logits_behind_the_last_tokens(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    prompt = _prompt(CHUNKS)
    alone = engine.prefill(prompt)
    assert alone.logits.ndim == 1
    several = engine.prefill(prompt, logits_to_keep=3)
    assert several.logits.shape == (3, alone.logits.numel())
    assert (several.logits[-1] - alone.logits).abs().max() < TOLERANCE
    # A prompt without its last token ends where the one before it stands.
    shorter = BlendPrompt(words(4, 50), CHUNKS, " ".join(words(6, 51).split()[:-1]))
    assert (engine.prefill(shorter).logits - several.logits[-2]).abs().max() < TOLERANCE
    for count in (0, 7):
        with pytest.raises(PromptError, match=f"logits_to_keep={count} must be from 1 to 6"):
            engine.prefill(prompt, logits_to_keep=count)


def test_a_bos_in_the_prefix_is_not_doubled(engine: BlendEngine) -> None:
    assert engine.prompt_ids(BlendPrompt("<bos> t5", [], "t6")) == (1, 5, 6)
    assert engine.prompt_ids(BlendPrompt("t5", [], "t6")) == (1, 5, 6)
    assert engine.prompt_ids(BlendPrompt(segments=[[1, 5], [6]])) == (1, 5, 6)


def test_a_separator_stands_between_chunks_only(engine: BlendEngine) -> None:
    prompt = BlendPrompt("t5", [Chunk("t10"), Chunk("t11"), Chunk("t12")], "t6", separator="t7")
    assert engine.prompt_ids(prompt) == (1, 5, 10, 7, 11, 7, 12, 6)


@pytest.mark.parametrize("gap", [0, 9])
def test_positions_place_segments(engine: BlendEngine, gap: int) -> None:
    engine.add(CHUNKS)
    prefix, suffix = words(4, 1), words(6, 2)
    positions = [0, 5 + gap, 25 + gap, 47 + 2 * gap]
    prompt = BlendPrompt(segments=[prefix, ChunkRef("n0"), ChunkRef("n1"), suffix], positions=positions)
    ids = torch.tensor([engine.prompt_ids(prompt)])
    starts = [0, 5, 25, 47, 53]
    places = torch.cat([torch.arange(b - a) + p for a, b, p in zip(starts, starts[1:], positions, strict=False)])[None]
    config = engine.blend.replace(recompute_ratio=1.0)
    with torch.no_grad():
        wanted = engine.model(input_ids=ids, position_ids=places, past_key_values=None).logits[0, -1]
        cached = engine.prefill(prompt, blend=config)
    if not gap:
        assert (cached.logits - wanted).abs().max() < TOLERANCE
    reused = engine.prefill(prompt, blend=engine.blend.replace(selector="none"))
    assert reused.report.hits == 2
    answer = engine.generate(prompt, 5, blend=config, do_sample=False)
    assert len(answer.token_ids) >= 1


def test_generate_and_stream_give_the_same_text(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    answer = engine.generate(_prompt(CHUNKS), 16, do_sample=False)
    stream = engine.stream(_prompt(CHUNKS), 16, do_sample=False)
    assert "".join(stream) == answer.text
    result = stream.result()
    assert result.token_ids == answer.token_ids
    assert result.report.hits == 4
    assert result.report.ttft_s > 0
    assert answer.report.output_tokens == len(answer.token_ids) <= 16


def test_an_abandoned_stream_ends(engine: BlendEngine) -> None:
    stream = engine.stream(_prompt(CHUNKS), 400, do_sample=True, eos_token_id=-1)
    next(stream)
    del stream
    gc.collect()
    waiting = [thread for thread in threading.enumerate() if thread.name == "cacheblend-stream"]
    for thread in waiting:
        thread.join(20)
    assert not any(thread.is_alive() for thread in waiting)


def test_closing_a_stream_keeps_what_was_generated(engine: BlendEngine) -> None:
    stream = engine.stream(_prompt(CHUNKS), 400, do_sample=True, eos_token_id=-1)
    first = next(stream)
    stream.close()
    rest = "".join(stream)
    assert stream.result().text == first + rest
    assert len(stream.result().token_ids) < 400


class Held(StoppingCriteria):
    """Keeps the model busy at its first token, until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.begun.set()
        self.go_on.wait(60)
        return torch.tensor([True])


def test_a_call_waits_for_the_model_as_long_as_it_was_told(engine: BlendEngine) -> None:
    held = Held()
    stream = engine.stream(_prompt(CHUNKS), 4, stopping_criteria=[held])
    held.begun.wait(60)
    try:
        late = engine.stream(_prompt(CHUNKS), 4, wait_s=0.01)
        for ask in (
            late.result,
            lambda: list(late),
            lambda: engine.generate(_prompt(CHUNKS), 4, wait_s=0),
            # The second has chunks to encode first.
            lambda: engine.generate_many([_prompt(CHUNKS[:2])] * 2, 4, wait_s=0.01),
            lambda: engine.generate_many([_prompt([Chunk(words(30, 9))])] * 2, 4, wait_s=0.01),
            lambda: asyncio.run(engine.agenerate_many([_prompt(CHUNKS)], 4, wait_s=0.01)),
        ):
            with pytest.raises(AnswerTimeoutError, match="the model was busy with other calls"):
                ask()
        waiting = engine.stream(_prompt(CHUNKS), 4, wait_s=60)
    finally:
        held.go_on.set()
    assert stream.result().token_ids
    assert waiting.result().token_ids == engine.generate(_prompt(CHUNKS), 4, wait_s=0).token_ids
    assert engine.generate(_prompt(CHUNKS), 4, wait_s=math.inf).token_ids
    for wait_s in (-1, math.nan, "soon"):
        with pytest.raises(ConfigError, match="wait_s"):
            engine.generate(_prompt(CHUNKS), 4, wait_s=wait_s)  # type: ignore[arg-type]


def test_the_model_is_left_as_it_was(engine: BlendEngine) -> None:
    ids = torch.tensor([[1, 5, 6, 7]])
    with torch.no_grad():
        before = engine.model(input_ids=ids).logits
        engine.prefill(_prompt(CHUNKS))
        assert torch.equal(engine.model(input_ids=ids).logits, before)
    assert not any(module._forward_pre_hooks for module in engine.model.modules())


def test_no_hit_at_all_is_said_once(engine: BlendEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="cacheblend_rag"):
        engine.prefill(_prompt(CHUNKS[:2]))
        engine.prefill(_prompt(CHUNKS[2:]))
    assert sum("was served from the store" in record.message for record in caplog.records) == 1


def test_a_store_of_ones_own_is_not_closed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv", ram_bytes=10**6)
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), store=store) as engine:
        engine.add(CHUNKS)
    assert store.stats().entries == 8
    store.close()


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.float16), ("gemma3", torch.float16), ("qwen3", torch.bfloat16)]
)
def test_half_precision_is_stored(make_engine: MakeEngine, tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family).to(dtype)
    engine = make_engine(tmp_path / "kv", model=model, strict=True)
    engine.add(CHUNKS)
    near = engine.prefill(_prompt(CHUNKS), blend=engine.blend.replace(recompute_ratio=0.99, selector="random"))
    whole = engine.prefill(_prompt(CHUNKS), blend=engine.blend.replace(enabled=False))
    assert near.report.hits == 4
    assert near.logits.dtype == dtype
    assert torch.nn.functional.cosine_similarity(near.logits.float(), whole.logits.float(), dim=0) > 0.9


def test_a_chunk_deleted_while_it_is_encoded_is_not_kept(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.add(CHUNKS[:1])
    record = engine.records(["n0"])[0]
    assert record is not None
    engine._store.discard(record.key)
    put_later = engine._store.put_later

    def delete_then_put(key: str, kv: ChunkKV, *arguments: Any, **options: Any) -> bool:
        engine.delete(["n0"])
        return put_later(key, kv, *arguments, **options)

    monkeypatch.setattr(engine._store, "put_later", delete_then_put)
    assert engine.prefill(BlendPrompt("t5", ["n0"], "t6")).report.misses == 1
    assert engine._store.holds([record.key]) == [False]


def test_a_checkpoints_own_wish_for_beams_or_another_cache_is_set_aside(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    wanted = engine.generate(_prompt(CHUNKS), 8, do_sample=False).token_ids
    engine.model.generation_config.num_beams = 3
    engine.model.generation_config.cache_implementation = "static"
    assert engine.generate(_prompt(CHUNKS), 8, do_sample=False).token_ids == wanted


def test_a_miss_with_an_id_is_named_and_one_without_stays_in_ram(tmp_path: Path) -> None:
    settings = engine_settings(selector="hkvd")
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), **settings, store=tmp_path / "kv") as engine:
        prompt = BlendPrompt("t5", [CHUNKS[0], Chunk(CHUNKS[1].text)], "t6")
        engine.prefill(prompt)
        assert engine.ids() == ["n0"]
        assert engine.prefill(prompt).report.hits == 2
        changed = [Chunk(words(9, seed), "n0") for seed in range(60, 64)]
        for chunk in changed:
            engine.prefill(BlendPrompt("t5", [chunk], "t6"))
        assert engine.delete(["n0"]) == 1
    with BlendEngine(engine.model, engine.tokenizer, **settings, store=tmp_path / "kv") as after:
        assert after._store.stats().entries == 0
        assert not list((tmp_path / "kv").rglob("*.safetensors"))


def test_a_stream_over_damaged_kv_shows_the_answer_only(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "kv", ram_bytes=0, selector="hkvd")
    engine.add(CHUNKS)
    damage(next((tmp_path / "kv").rglob("*.safetensors")))
    stream = engine.stream(_prompt(CHUNKS), 12, do_sample=False)
    assert "".join(stream) == stream.result().text


def test_a_report_of_a_whole_prefill_claims_no_reuse(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    report = engine.prefill(_prompt(CHUNKS), blend=engine.blend.replace(enabled=False)).report
    assert (report.recompute_ratio, report.charged_ratio, report.recomputed_tokens) == (1.0, 1.0, 79)
    assert {(c.hit, c.recomputed_tokens == c.tokens, c.reason) for c in report.chunks} == {(True, True, None)}
    assert "4 of 4 chunks hit, 79 of 79 chunk tokens recomputed; prefilled in full" in str(report)
