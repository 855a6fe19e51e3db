"""Why a chunk missed, and what a prompt waited for."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, BlendReport, Chunk
from cacheblend_rag.store import open_store
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words
from tests.store.kit import files_of

CHUNKS = [Chunk(words(12, seed), f"n{seed}") for seed in range(4)]
NEVER = "it was never added under its id, was deleted, or was in a store in RAM before a restart"
OTHER = "its text is not the text that was added under this id"
EVICTED = "its KV was evicted: dropped for room, or expired"
UNREAD = "its stored KV could not be read"
NO_ID = "it has no id, and no chunk with its text was added"
NOT_YET = "its KV is not computed yet, or went with a deleted chunk that it was read behind"
MODEL = tiny_model("llama")


def open_engine(store: object = None, **values: object) -> BlendEngine:
    given = {"self_check": False, "selector": "none", "recompute_ratio": 0.0, **values}
    return BlendEngine(MODEL, tiny_tokenizer(), **engine_settings(**given), store=store)  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Iterator[BlendEngine]:
    with open_engine() as engine:
        yield engine


def ask(engine: BlendEngine, *chunks: Chunk | str, **values: bool) -> dict[str | None, str | None]:
    """Return the reason of each chunk by its id; none of a hit has one, and each miss has."""
    prompt = BlendPrompt(words(3, 70), list(chunks), words(4, 71))
    report = engine.prefill(prompt, blend=engine.blend.replace(**values)).report
    assert all((chunk.reason is None) == chunk.hit for chunk in report.chunks)
    return {chunk.id: chunk.reason for chunk in report.chunks}


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([*"added deleted never changed alien evicted".split(), "no id"]), min_size=1, max_size=6),
    st.booleans(),
)
def test_each_miss_says_why_and_no_hit_does(kinds: list[str], enabled: bool) -> None:
    wanted = {"added": None, "deleted": NEVER, "never": NEVER, "changed": OTHER, "no id": NO_ID, "evicted": EVICTED}
    wanted["alien"] = f"{NEVER}, like all of its document 'unheard of'"
    with open_engine() as engine:
        chunks: list[Chunk] = []
        for number, kind in enumerate(kinds):
            text, id = words(8, 10 + number), f"c{number}"
            if kind in ("added", "deleted", "evicted"):
                engine.add([Chunk(text, id)])
            elif kind == "changed":
                engine.add([Chunk(words(8, 40 + number), id)])
            if kind == "deleted":
                engine.delete([id])
            chunks.append(
                Chunk(text)
                if kind == "no id"
                else Chunk(text, id, document="unheard of", start=0)
                if kind == "alien"
                else Chunk(text, id)
            )
        gone = [engine.records([f"c{n}"])[0] for n, kind in enumerate(kinds) if kind == "evicted"]
        # What has been used last is kept, so that room for nothing else drops just these.
        ram = engine._store._tiers.ram
        held, evicted = ram.keys(), {key for record in gone if record for key in record.keys}
        for key in held:
            if key not in evicted:
                ram.get(key)
        for _ in evicted:
            ram.limit_bytes = ram.nbytes() - 1
            assert ram.reserve(0)
        ram.limit_bytes = 2**40
        prompt = BlendPrompt(words(3, 70), chunks, words(4, 71))
        report = engine.prefill(prompt, blend=engine.blend.replace(enabled=enabled)).report
        assert [chunk.reason for chunk in report.chunks] == [wanted[kind] for kind in kinds]
        assert [chunk.hit for chunk in report.chunks] == [kind == "added" for kind in kinds]
        others = engine.metrics.registry.get_sample_value("cacheblend_other_texts_total")
        assert others == kinds.count("changed")


def test_of_a_text_that_was_replaced_or_deleted_that_is_said_and_not_that_its_kv_is_gone(tmp_path: Path) -> None:
    with open_engine(tmp_path) as engine:
        engine.add(CHUNKS[:2])
        engine.add([Chunk(words(9, 30), "n0")])
        engine.delete(["n1"])
        assert ask(engine, *CHUNKS[:2]) == {"n0": OTHER, "n1": NEVER}


def test_a_folder_tells_evicted_damaged_and_expired_apart_from_unknown(tmp_path: Path) -> None:
    now = [1000.0]
    store = open_store(tmp_path, 0, clock=lambda: now[0])
    with closing(store), open_engine(store) as engine:
        engine.add(CHUNKS[:2])
        files = files_of(tmp_path)
        engine.add([CHUNKS[2]], ttl_s=10)
        for file in files:
            file.write_bytes(file.read_bytes()[:40])
        now[0] += 20
        reasons = ask(engine, *CHUNKS)
    assert [reasons[f"n{number}"] for number in range(4)] == [UNREAD, UNREAD, EVICTED, NEVER]
    # Another process learns of it by the index.
    size = max(file.stat().st_size for file in files_of(tmp_path))
    with closing(open_store(tmp_path, 0, 6 * size)) as store, open_engine(store) as engine:
        engine.add([Chunk(words(12, 30), "n8"), Chunk(words(12, 31), "n9")])
    with open_engine(tmp_path) as engine:
        reasons = ask(engine, *(id for id in engine.ids()))
    assert set(reasons.values()) == {EVICTED, None}


def test_kv_that_nobody_has_computed_yet(tmp_path: Path) -> None:
    document = [Chunk(words(9, seed), f"d{seed}", document="d", start=seed * 100) for seed in range(3)]
    with open_engine(tmp_path) as engine:
        engine.add(document)
        engine.delete(["d0"])
        assert ask(engine, "d1", "d2") == {"d1": None, "d2": NOT_YET}
        assert ask(engine, "d1", "d2") == {"d1": None, "d2": None}


def test_a_prompt_that_is_computed_as_a_whole_still_says_what_missed(engine: BlendEngine) -> None:
    engine.add(CHUNKS[:1])
    assert ask(engine, *CHUNKS[:2], enabled=False) == {"n0": None, "n1": NEVER}


def test_a_remote_tier_that_does_not_answer_is_the_reason(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason="redis-py is not installed (extra redis)")
    # A port that is the system's own, where nobody listens.
    with open_engine(tmp_path, remote="redis://127.0.0.1:1") as engine:
        assert ask(engine, CHUNKS[0])["n0"] == "its KV is not stored here, and the remote tier does not answer"


def parts_of(report: BlendReport) -> float:
    parts = (report.queue_s, report.load_s, report.encode_s, report.recompute_s, report.overhead_s)
    assert all(part >= 0 for part in parts)
    return sum(parts)


def test_the_parts_of_the_time_to_first_token_add_up(engine: BlendEngine) -> None:
    engine.add(CHUNKS[:2])
    prompts = [BlendPrompt(words(3, seed), CHUNKS[:seed], words(4, 60 + seed)) for seed in (1, 2, 3)]
    reports = [engine.generate(prompt, 3, do_sample=False).report for prompt in prompts]
    reports += [result.report for result in engine.generate_many(prompts, 3, do_sample=False)]
    reports += [engine.prefill(prompts[0]).report]
    for report in reports:
        assert parts_of(report) == pytest.approx(report.ttft_s, abs=1e-6)
        assert report.overhead_s < report.ttft_s


def test_a_prompt_says_how_long_it_waited_for_the_model(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    prompt = BlendPrompt(words(3, 70), CHUNKS, words(4, 71))
    alone = engine.generate(prompt, 2, do_sample=False).report
    taken, leave = threading.Event(), threading.Event()

    def compute() -> None:
        with engine._runner.scheduler:
            taken.set()
            leave.wait(10)

    thread = threading.Thread(target=compute)
    thread.start()
    taken.wait()
    stream = engine.stream(prompt, 2, do_sample=False)
    time.sleep(0.3)
    leave.set()
    report = stream.result().report
    thread.join()
    assert 0.25 < report.queue_s < report.ttft_s
    assert parts_of(report) - report.queue_s < report.ttft_s - 0.25
    assert "waiting for the model" in str(report)
    assert alone.queue_s < 0.1
    counted = engine.metrics.registry.get_sample_value("cacheblend_queue_seconds_total")
    assert counted == pytest.approx(alone.queue_s + report.queue_s)


def test_in_a_batch_the_others_are_waited_for_and_are_no_overhead(engine: BlendEngine) -> None:
    engine.add(CHUNKS)
    prompts = [BlendPrompt(words(3, seed), CHUNKS, words(4, 60 + seed)) for seed in range(8)]
    forward = engine.model.forward

    def slow(*args: object, **kwargs: object) -> object:
        time.sleep(0.02)
        return forward(*args, **kwargs)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.model, "forward", slow)
        reports = [result.report for result in engine.generate_many(prompts, 2, do_sample=False)]
    for report in reports:
        # Seven others were prefilled before the first token came.
        assert report.queue_s > 7 * 0.02
        assert report.overhead_s < 7 * 0.02


@pytest.fixture
def counted(make_engine: MakeEngine) -> BlendEngine:
    engine = make_engine(recompute_ratio=0.25)
    engine.add([Chunk(id="a", text=words(8, 1)), Chunk(id="b", text=words(8, 2))])
    return engine


PROMPT = BlendPrompt(words(3, 3), ["a", "b", Chunk(text=words(8, 4))], words(4, 5))


def value(engine: BlendEngine, name: str, **labels: str) -> float | None:
    return engine.metrics.registry.get_sample_value(f"cacheblend_{name}", labels)


def test_counts(counted: BlendEngine) -> None:
    first = counted.prefill(PROMPT).report
    second = counted.generate(PROMPT, max_new_tokens=3).report
    whole = counted.prefill(BlendPrompt(words(3, 3))).report
    stream = counted.stream(PROMPT, max_new_tokens=2)
    list(stream)
    reports = [first, second, whole, stream.result().report]
    assert value(counted, "prompts_total", selector="boundary") == 3
    assert value(counted, "prompts_total", selector="full") == 1
    # A prompt without chunks does not count.
    assert value(counted, "fallbacks_total") == 0
    hits = (value(counted, "chunks_total", tier="ram") or 0) + (value(counted, "chunks_total", tier="not read") or 0)
    assert hits == sum(report.hits for report in reports)
    assert value(counted, "chunks_total", tier="miss") == sum(report.misses for report in reports) == 1
    assert value(counted, "load_bytes_total") == sum(report.load_bytes for report in reports) > 0
    assert value(counted, "recomputed_tokens_total") == sum(report.recomputed_tokens for report in reports)
    assert value(counted, "output_tokens_total") == sum(report.output_tokens for report in reports) > 0
    assert value(counted, "ttft_seconds_count") == 4
    assert value(counted, "store_names") == 2
    assert value(counted, "store_bytes", tier="ram") == counted._store.stats().ram_bytes > 0
    assert b"cacheblend_ttft_seconds_bucket" in generate_latest(counted.metrics.registry)


def test_log_line_carries_the_figures(counted: BlendEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="cacheblend_rag"):
        report = counted.prefill(PROMPT).report
    (record,) = (record for record in caplog.records if hasattr(record, "blend"))
    assert record.getMessage() == str(report)
    assert record.blend == report.to_dict()


def test_counts_can_be_read_after_the_end(counted: BlendEngine) -> None:
    counted.prefill(PROMPT)
    counted.close()
    assert value(counted, "ttft_seconds_count") == 1
    assert value(counted, "store_names") is None
