"""What an engine counts and logs."""

import logging

import pytest
from prometheus_client import generate_latest

from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from tests.engines import MakeEngine
from tests.families import words


@pytest.fixture
def engine(make_engine: MakeEngine) -> BlendEngine:
    engine = make_engine(recompute_ratio=0.25)
    engine.add([Chunk(id="a", text=words(8, 1)), Chunk(id="b", text=words(8, 2))])
    return engine


PROMPT = BlendPrompt(words(3, 3), ["a", "b", Chunk(text=words(8, 4))], words(4, 5))


def value(engine: BlendEngine, name: str, **labels: str) -> float | None:
    return engine.metrics.registry.get_sample_value(f"cacheblend_{name}", labels)


def test_counts(engine: BlendEngine) -> None:
    first = engine.prefill(PROMPT).report
    second = engine.generate(PROMPT, max_new_tokens=3).report
    whole = engine.prefill(BlendPrompt(words(3, 3))).report
    stream = engine.stream(PROMPT, max_new_tokens=2)
    assert "".join(stream)
    reports = [first, second, whole, stream.result().report]
    assert value(engine, "prompts_total", selector="hkvd") == 3
    assert value(engine, "prompts_total", selector="full") == 1
    # A prompt without chunks does not count.
    assert value(engine, "fallbacks_total") == 0
    hits = (value(engine, "chunks_total", tier="ram") or 0) + (value(engine, "chunks_total", tier="not read") or 0)
    assert hits == sum(report.hits for report in reports)
    assert value(engine, "chunks_total", tier="miss") == sum(report.misses for report in reports) == 1
    assert value(engine, "load_bytes_total") == sum(report.load_bytes for report in reports) > 0
    assert value(engine, "recomputed_tokens_total") == sum(report.recomputed_tokens for report in reports)
    assert value(engine, "output_tokens_total") == 5
    assert value(engine, "ttft_seconds_count") == 4
    assert value(engine, "store_names") == 2
    assert value(engine, "store_bytes", tier="ram") == engine._store.stats().ram_bytes > 0
    assert b"cacheblend_ttft_seconds_bucket" in generate_latest(engine.metrics.registry)


def test_log_line_carries_the_figures(engine: BlendEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="cacheblend_rag"):
        report = engine.prefill(PROMPT).report
    (record,) = (record for record in caplog.records if hasattr(record, "blend"))
    assert record.getMessage() == str(report)
    assert record.blend == report.to_dict()


def test_counts_can_be_read_after_the_end(engine: BlendEngine) -> None:
    engine.prefill(PROMPT)
    engine.close()
    assert value(engine, "ttft_seconds_count") == 1
    assert value(engine, "store_names") is None
