"""What an engine does over a backend that is no model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import AnswerTimeoutError, ConfigError
from tests.core.stub import EchoBackend
from tests.engines import evict
from tests.families import tiny_tokenizer, words

PROMPT = BlendPrompt("t5", ["n0", "n1"], "t6 t7")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    blend = BlendConfig(selector="boundary", recompute_ratio=0.1)
    with BlendEngine(EchoBackend(tiny_tokenizer()), blend=blend, store=tmp_path) as engine:
        engine.add([Chunk(words(20, seed), f"n{seed}") for seed in range(2)])
        yield engine


def test_hits_an_answer_and_a_report(engine: BlendEngine) -> None:
    result = engine.generate(PROMPT)
    report = result.report
    assert (result.text, result.finish_reason, report.output_tokens) == ("t6 t7", "length", 2)
    assert (report.hits, report.misses, report.recomputed_tokens, report.charged_ratio) == (2, 0, 4, 0.1)
    assert (report.selector, report.fallback_reason) == ("boundary", None)
    assert [chunk.recomputed_tokens for chunk in report.chunks] == [0, 4]


def test_a_miss_is_computed_and_a_hit_the_next_time(engine: BlendEngine) -> None:
    evict(engine, "n1")
    assert [engine.generate(PROMPT).report.hits for _ in range(2)] == [1, 2]


def test_in_full_and_without_chunks(engine: BlendEngine) -> None:
    full = engine.prefill(PROMPT, blend=BlendConfig(recompute_ratio=1.0))
    assert int(full.logits.argmax()) == 6
    assert (full.report.selector, full.report.recomputed_tokens, full.report.hits) == ("full", 40, 2)
    assert engine.generate(BlendPrompt(segments=["t8"])).report.fallback_reason == "the prompt has no chunks"


def test_many_and_streams_and_tenants(engine: BlendEngine) -> None:
    assert [each.text for each in engine.generate_many([PROMPT, PROMPT], 1)] == ["t6", "t6"]
    assert "".join(engine.stream(PROMPT)) == "t6 t7"
    with engine.for_tenant("other") as other:
        assert not list(other.ids())
    for call in (
        lambda: engine.generate(PROMPT, do_sample=True),
        lambda: engine.check_blend(BlendConfig(selector="a3")),
    ):
        with pytest.raises(ConfigError):
            call()


def test_damaged_kv_is_a_miss(engine: BlendEngine, tmp_path: Path) -> None:
    engine.close()
    for file in tmp_path.rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-8] ^= 255
        file.write_bytes(data)
    with BlendEngine(EchoBackend(tiny_tokenizer()), store=tmp_path) as again:
        reports = [again.generate(PROMPT).report for _ in range(2)]
    assert [(report.hits, report.misses) for report in reports] == [(0, 2), (2, 0)]


def test_who_may_not_wait_is_told(engine: BlendEngine) -> None:
    with engine.backend.scheduler, ThreadPoolExecutor(1) as pool:
        assert isinstance(pool.submit(engine.generate, PROMPT, wait_s=0.05).exception(), AnswerTimeoutError)
