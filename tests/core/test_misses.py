"""Why a chunk missed, what a prompt waited for, and what is counted of it."""

import logging
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from tests.engines import MakeEngine, busy, evict
from tests.families import tiny_model, tiny_tokenizer, words
from tests.store.kit import damage, files_of

ENGINE = {"self_check": False, "recompute_ratio": 0.0}
CHUNKS = [Chunk(words(12, seed), f"n{seed}") for seed in range(4)]
MODEL = tiny_model("llama")


def asking(*chunks: Chunk | str) -> BlendPrompt:
    return BlendPrompt(words(3, 70), list(chunks), words(4, 71))


@settings(max_examples=20)
@given(
    st.lists(st.sampled_from([*"added deleted never changed lost".split(), "no id"]), min_size=1, max_size=6),
    st.booleans(),
)
def test_each_miss_says_why_and_no_hit_does(kinds: list[str], enabled: bool) -> None:
    # A word that each reason has and no other.
    words_of = {"deleted": "never", "never": "never", "changed": "not the text", "no id": "no id"}
    with BlendEngine(MODEL, tiny_tokenizer(), **engine_settings(**ENGINE)) as engine:
        chunks: list[Chunk] = []
        for number, kind in enumerate(kinds):
            text, id = words(8, 10 + number), f"c{number}"
            chunks.append(Chunk(text, None if kind == "no id" else id))
            if kind in ("added", "deleted", "lost"):
                engine.add([Chunk(text, id)])
            elif kind == "changed":
                engine.add([Chunk(words(8, 40 + number), id)])
        engine.delete([f"c{number}" for number, kind in enumerate(kinds) if kind == "deleted"])
        evict(engine, *(f"c{number}" for number, kind in enumerate(kinds) if kind == "lost"))
        report = engine.prefill(asking(*chunks), blend=engine.blend.replace(enabled=enabled)).report
        assert [chunk.hit for chunk in report.chunks] == [kind == "added" for kind in kinds]
        for chunk, kind in zip(report.chunks, kinds, strict=True):
            assert (chunk.reason is None) == chunk.hit
            assert words_of.get(kind, "") in (chunk.reason or "")
        others = engine.metrics.registry.get_sample_value("cacheblend_other_texts_total")
        assert others == kinds.count("changed")


def test_what_is_damaged_or_evicted_is_told_apart_from_unknown(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, MODEL, ram_bytes=0)
    engine.add(CHUNKS[:3])
    evict(engine, "n2")
    for file in files_of(tmp_path):
        damage(file)
    reasons = [chunk.reason for chunk in engine.prefill(asking(*CHUNKS)).report.chunks]
    assert all(word in str(reasons[at]) for at, word in ((0, "read"), (1, "read"), (2, "evicted"), (3, "never")))


def test_the_parts_of_the_time_to_first_token_add_up(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(CHUNKS[:2])
    prompts = [BlendPrompt(words(3, seed), CHUNKS[:seed], words(4, 60 + seed)) for seed in (1, 2, 3)]
    reports = [engine.generate(prompt, 3, do_sample=False).report for prompt in prompts]
    reports += [result.report for result in engine.generate_many(prompts, 3, do_sample=False)]
    reports += [engine.prefill(prompts[0]).report]
    with busy(engine) as until:
        stream = engine.stream(prompts[0], 2, do_sample=False)
        until(1)
        time.sleep(0.3)
    reports += [stream.result().report]
    assert reports[-1].queue_s > 0.25
    for report in reports:
        parts = (report.queue_s, report.load_s, report.encode_s, report.recompute_s, report.overhead_s)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(report.ttft_s, abs=1e-6)
        assert report.overhead_s < report.ttft_s


def test_counts(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(selector="boundary", recompute_ratio=0.25)
    engine.add(CHUNKS[:2])
    prompt = asking("n0", "n1", Chunk(words(8, 4)))
    with caplog.at_level(logging.INFO, logger="cacheblend_rag"):
        reports = [engine.prefill(prompt).report, engine.generate(prompt, max_new_tokens=3).report]
    assert [record.blend for record in caplog.records if hasattr(record, "blend")] == [r.to_dict() for r in reports]
    # A prompt without chunks is no fallback.
    reports.append(engine.prefill(BlendPrompt(words(3, 3))).report)
    reports.append(engine.stream(prompt, max_new_tokens=2).result().report)

    def value(name: str, **labels: str) -> float | None:
        return engine.metrics.registry.get_sample_value(f"cacheblend_{name}", labels)

    assert [value("prompts_total", selector=each) for each in ("boundary", "full")] == [3, 1]
    assert value("fallbacks_total") == 0
    hits = (value("chunks_total", tier="ram") or 0) + (value("chunks_total", tier="not read") or 0)
    assert hits == sum(report.hits for report in reports)
    assert value("chunks_total", tier="miss") == sum(report.misses for report in reports) == 1
    for name in ("load_bytes", "recomputed_tokens", "output_tokens"):
        assert value(f"{name}_total") == sum(getattr(report, name) for report in reports) > 0
    assert value("store_names") == 2
    assert value("store_bytes", tier="ram") == engine.store.stats().ram_bytes > 0
    engine.close()
    # Read after the end.
    assert (value("ttft_seconds_count"), value("store_names")) == (4, None)
