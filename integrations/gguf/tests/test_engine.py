"""Chunks and answers of two real models: a plain one, and one with sliding windows."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria

from cacheblend_attachments import SourceAttention, calibrate
from cacheblend_gguf import GGUFEngine
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk, ChunkRef, EngineConfig, FixedText
from cacheblend_rag.encode import Target
from cacheblend_rag.engine.lookup import Pace
from cacheblend_rag.errors import AnswerTimeoutError, CacheBlendError, ConfigError, PromptError, UnknownChunkError
from integrations.gguf.tests.kit import HARBOUR, QUESTION, ask, harbour, last_scores, read_blended, read_in_full

EXACT = EngineConfig(disk_codec="native")


@pytest.fixture(scope="module")
def filled(engine: GGUFEngine) -> GGUFEngine:
    engine.add(harbour())
    return engine


def test_a_reading_goes_on_after_others_had_its_cells(filled: GGUFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, llama, sizes = filled._supply.encoder, filled.llama, []
    targets = [Target((5, 6, 7), tuple(range(30, 730))), Target((8, 9), tuple(range(30, 732)))]
    alone = [each for batch in encoder.encode(targets) for each in batch]
    llama.read((1, 2, 3), 3)
    decode = llama.decode
    monkeypatch.setattr(llama, "decode", lambda ids, *given: (sizes.append(len(ids)), decode(ids, *given))[1])
    between = []
    for batch in encoder.encode(targets):
        between += batch
        llama.read((1, 2, 3), 3)
    assert sizes[0] == 512 < sizes[2]
    for (number, kv), (other, expected) in zip(between, alone, strict=True):
        assert number == other and kv.start == expected.start
        for layer, like in zip(kv.layers, expected.layers, strict=True):
            # Other batches round otherwise: with 8 bits by a few hundredths.
            assert (layer.values.float() - like.values.float()).norm() < 0.1 * like.values.float().norm()


@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.6])
def test_chunks_are_put_together_as_llama_cpp_reads_them(filled: GGUFEngine, ratio: float) -> None:
    pair = [Chunk(text, f"p{number}", document="pair", start=200 * number) for number, text in enumerate(HARBOUR[:2])]
    filled.add(pair)
    preamble = list(filled._assembler.preamble)
    prompt = BlendPrompt(segments=[preamble, ChunkRef("p0"), ChunkRef("p1"), QUESTION])
    with last_scores(filled) as seen:
        result = filled.generate(prompt, 1, blend=BlendConfig(recompute_ratio=ratio, selector="boundary"))
    assert result.report.hits == 2
    first, second = result.report.chunks
    run = second.recomputed_tokens
    assert result.report.recomputed_tokens == round(ratio * result.report.context_tokens)
    [record] = filled.records(["p1"])
    assert record is not None
    place = len(preamble) + first.tokens
    wanted = read_blended(filled, result.prompt_ids, record, place, run)
    full, again = (read_in_full(filled, result.prompt_ids, batch) for batch in (512, 37))
    # What llama.cpp's own reads of it differ by, with other batch sizes.
    noise = abs(full - again).max()
    assert abs(seen[0] - wanted).max() <= 2 * noise
    if run == second.tokens:
        # That is the prompt as llama.cpp reads it.
        assert abs(seen[0] - full).max() <= 2 * noise
    filled.delete(["p0", "p1"])


def test_any_order_of_hits_and_misses(filled: GGUFEngine) -> None:
    ids = [f"h{number}" for number in range(len(HARBOUR))]
    for seed in range(5):
        draw = random.Random(seed)
        prompt = ask(*draw.sample(ids, draw.randint(1, len(ids))))
        whole = filled.generate(prompt, 6)
        for record in filled.records(draw.sample(ids, 2)):
            assert record is not None
            filled._store.discard(record.key)
        again = filled.generate(prompt, 6)
        assert (again.token_ids, again.report.hits + again.report.misses) == (whole.token_ids, whole.report.hits)
        filled.add(harbour())


def test_scores(filled: GGUFEngine) -> None:
    prompt = ask("h0", "h1")
    with last_scores(filled) as seen:
        filled.generate(prompt, 1)
    found = filled.prefill(prompt, logits_to_keep=5)
    assert found.logits.shape == (5, len(filled.tokenizer))
    assert torch.allclose(found.logits[-1], torch.from_numpy(seen[0]), atol=2)
    # A head that is stored does not shorten what is asked for.
    fixed = BlendPrompt(segments=[FixedText("A long head that begins every prompt of this kind, word for word."), "x"])
    for _ in range(2):
        assert filled.prefill(fixed, logits_to_keep=6).logits.isfinite().all()
    with pytest.raises(PromptError, match="logits_to_keep"):
        filled.prefill(prompt, logits_to_keep=1000)


def test_streams_are_the_answers(filled: GGUFEngine) -> None:
    whole = filled.generate(ask("h1", "h2"), 12)
    stream = filled.stream(ask("h1", "h2"), 12)
    assert "".join(stream) == whole.text
    assert stream.result().token_ids == whole.token_ids
    stopped = filled.stream(ask("h1", "h2"), 1000, eos_token_id=[])
    next(stopped)
    stopped.close()
    assert len(stopped.result().token_ids) < 1000


def test_options(filled: GGUFEngine) -> None:
    drawn = [filled.generate(ask("h2"), 8, do_sample=True, temperature=1.5, seed=5).token_ids for _ in range(2)]
    assert drawn[0] == drawn[1]
    ended = filled.generate(ask("h2"), 64, stop_strings=["."], eos_token_id=[])
    assert ended.text.count(".") == 1
    with pytest.raises(ConfigError, match="num_beams"):
        filled.generate(ask("h2"), 8, num_beams=4)
    calm = filled.generate(ask("h2"), 24, repetition_penalty=1.3, no_repeat_ngram_size=2, eos_token_id=[]).token_ids
    assert len(set(pairwise(calm))) == len(calm) - 1
    with pytest.raises(ConfigError, match="boundary"):
        filled.generate(ask("h2"), 8, blend=BlendConfig(recompute_ratio=0.15, selector="hkvd"))
    assert filled.generate(ask("h2"), 2, blend=BlendConfig(recompute_ratio=1.0)).report.selector == "full"
    with pytest.raises(ConfigError, match="SourceAttention needs a model in transformers"):
        filled.attach(SourceAttention())
    with pytest.raises(PromptError, match="positions"):
        filled.generate(BlendPrompt(segments=["a"], positions=[5]), 8)
    with pytest.raises(UnknownChunkError):
        filled.generate(ask("nobody"), 8)


def test_looked_up_in_the_prompt(filled: GGUFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, steps = filled.llama.decoding, []
    prompts = [ask(f"h{number}", question="\n\nThe same once more, word for word:\n") for number in range(4)]
    monkeypatch.setattr(decoding, "pace", Pace(0))
    wanted = [filled.generate(prompt, 40, eos_token_id=[]).token_ids for prompt in prompts]
    pace = Pace()
    monkeypatch.setattr(decoding, "pace", pace)
    # As if more rows cost nothing.
    monkeypatch.setattr(pace, "note_step", lambda rows, seconds: steps.append(rows))
    monkeypatch.setattr(pace, "_seconds", 1.0)
    assert [filled.generate(prompt, 40, eos_token_id=[]).token_ids for prompt in prompts] == wanted
    assert max(steps) > 1
    assert len(steps) < 4 * 39


class Raising(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        raise ValueError("mine alone")


def test_callers_together_and_one_that_fails(filled: GGUFEngine) -> None:
    def call(number: int) -> str:
        options = {"stopping_criteria": [Raising()]} if number == 3 else {}
        try:
            # No answer ends before it has begun.
            prompt = ask(f"h{number % 4}", question=f" Number {number}?")
            return filled.generate(prompt, 6, eos_token_id=[], **options).text
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(call, range(16)))
    assert [number for number, text in enumerate(found) if text == "mine alone"] == [3]
    assert all(found)
    failed: dict[int, Exception] = {}
    many = filled.generate_many([ask("h0"), ask("nobody"), ask("h1")], 4, on_failed=failed.__setitem__)
    assert len(many) == 2
    assert list(failed) == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_is_gone(filled: GGUFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(filled.llama, "begin", broken)
        with pytest.raises(ZeroDivisionError):
            filled.generate(ask("h0"), 4)
    assert filled.generate(ask("h0"), 4).text


def test_what_has_not_begun_when_many_are_stopped_is_left_out(filled: GGUFEngine) -> None:
    stop = threading.Event()

    def hears(ids: torch.Tensor, scores: None) -> bool:
        stop.set()
        return False

    found = filled.generate_many([ask("h0"), ask("h1")], 64, batch_size=1, stop=stop, stopping_criteria=[hears])
    assert [0 < len(each.token_ids) < 64 for each in found] == [True]


def test_what_was_added_survives_and_what_was_deleted_is_gone(path: Path, tmp_path: Path) -> None:
    with GGUFEngine.from_pretrained(path, n_ctx=1024, store=tmp_path, config=EXACT) as engine:
        engine.add(harbour())
        answer = engine.generate(ask("h0", "h1", "h2"), 6)
        assert len(set(tmp_path.rglob("*.safetensors"))) == 8
    with GGUFEngine.from_pretrained(path, n_ctx=1024, store=tmp_path, config=EXACT) as engine:
        again = engine.generate(ask("h0", "h1", "h2"), 6)
        assert again.report.hits == 3
        assert again.token_ids == answer.token_ids
        before = set(tmp_path.rglob("*.safetensors"))
        other = engine.for_tenant("other")
        assert not other.contains("h0")
        other.close()
        seers = [
            each.id for each in engine.records(engine.ids()) if each and each.later and "h3" in dict(each.later.seen)
        ]
        engine.delete(["h3"])
        # Its own two, and what had seen it.
        assert len(set(tmp_path.rglob("*.safetensors"))) == len(before) - 2 - len(seers)
        with pytest.raises(UnknownChunkError):
            engine.generate(ask("h3"), 4)


def test_more_prompts_than_there_are_cells(path: Path) -> None:
    with GGUFEngine.from_pretrained(path, n_ctx=512, n_seq_max=3) as engine:
        engine.add(harbour())
        prompts = [ask("h0", "h1", "h2", question=f"{QUESTION} {number}") for number in range(6)]
        assert all(each.text for each in engine.generate_many(prompts, 30))
        results: list[Any] = []
        late = [Chunk(f"{HARBOUR[0]} {number}", f"late{number}") for number in range(8)]
        adding = threading.Thread(target=lambda: results.append(engine.add(late)))
        adding.start()
        assert all(each.text for each in engine.generate_many(prompts, 30))
        adding.join()
        assert results[0].encoded == 8


@pytest.mark.skipif(not entry_points(group="cacheblend_rag.engines"), reason="the distribution is not installed")
def test_the_same_two_lines_open_it(path: Path) -> None:
    with BlendEngine.from_pretrained(path, n_ctx=512) as engine:
        assert isinstance(engine, GGUFEngine)
        assert engine.is_called(path.name)
    for options in ({"type_k": "f17"}, {"n_ctx": -1}, {"kv_type": "f16"}, {"type_v": 8}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            BlendEngine.from_pretrained(path, **options)


def test_other_forms_of_kv(path: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"type_k": "q8_0", "type_v": "q4_0"}
    # The first encodes, and llama.cpp's cells lie otherwise then.
    answers = []
    for _ in range(3):
        with GGUFEngine.from_pretrained(path, n_ctx=512, store=tmp_path, config=EXACT, **options) as engine:
            engine.add(harbour())
            answers.append(engine.generate(ask("h2", "h0"), 6))
    assert [answer.report.hits for answer in answers] == [2, 2, 2]
    assert answers[1].token_ids == answers[2].token_ids


def test_callers_wait_no_longer_than_they_may(path: Path) -> None:
    with GGUFEngine.from_pretrained(path, n_ctx=512, n_seq_max=1) as engine:
        stream = engine.stream(BlendPrompt("Once"), 400, eos_token_id=[])
        next(stream)
        with pytest.raises(AnswerTimeoutError, match="let it wait longer"):
            engine.generate(BlendPrompt("Twice"), 4, wait_s=0.1)
        waiting = engine.stream(BlendPrompt("Twice"), 4)
        waiting.close()
        with pytest.raises(CacheBlendError, match="cancelled before it began"):
            waiting.result()
        engine.close()
        with pytest.raises(ConfigError, match="closed"):
            stream.result()


def test_calibration(filled: GGUFEngine) -> None:
    questions = [" When does the office open?", " Who has kept the lighthouse?", " Who sails for forty crowns?"]
    prompts = [
        ask(*(f"h{number}" for number in range(4)), question=f"\n\nQuestion:{each}\nAnswer:") for each in questions
    ]
    answers = ["At seven in the morning.", "Mara Holt.", "Otto Brand."]
    found = calibrate(filled, prompts, answers=answers, target=0.5)
    assert (found.selector, found.questions, [row.recompute_ratio for row in found.rows]) == ("none", 3, [0.0])
    assert found.full_loss < found.bare_loss and found.rows[0].recovered > 0.5
    assert "recomputes nothing" in found.reason
    with pytest.raises(ConfigError, match="selector"):
        calibrate(filled, prompts, selector="hkvd")
