"""The bench of a server: arrivals that follow their laws, and rows from a server of ours and as any client would ask it."""

import itertools
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from cacheblend_lab.bench.serve import ServeBench, arrivals
from cacheblend_lab.bench.settings import ServeSetting
from cacheblend_rag.errors import ConfigError
from integrations.serve.tests.conftest import engine_of, serving
from tests.command import run
from tests.families import tiny_reader

SIZES: dict[str, Any] = {"corpus": 12, "chunks": 3, "chunk_words": 12, "output_tokens": 4}
SMALL: dict[str, Any] = {"rates": (20.0,), "seconds": 1.0, **SIZES}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_reader(eos_token_id=None)


def test_arrivals_follow_the_rate_and_zipfs_law() -> None:
    setting = ServeSetting(rates=(5.0,), seconds=400, corpus=50, chunks=2, zipf=1.0)
    found = arrivals(setting, 5.0)
    assert found == arrivals(setting, 5.0)
    assert len(found) == pytest.approx(2000, rel=0.1)
    gaps = [later.at_s - one.at_s for one, later in itertools.pairwise(found)]
    # Of a Poisson process the gaps' deviation is their mean.
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.15)
    assert all(len(set(each.chunks)) == 2 for each in found)
    counts = [count for _, count in Counter(each.chunks[0] for each in found).most_common()]
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.4)
    even = Counter(each.chunks[0] for each in arrivals(ServeSetting(corpus=4, chunks=1, zipf=0.0, seconds=400), 5.0))
    assert max(even.values()) < 1.3 * min(even.values())


@pytest.mark.parametrize("prompts", ["documents", "text"])
def test_rows_are_complete(prompts: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    with engine_of(model, separator="\n\n") as engine, serving(engine) as address:
        options = ["--url", address, "--prompts", prompts, "--rates", "20", "--seconds", "1", "--corpus", "12"]
        options += ["--chunks", "3", "--chunk-words", "12", "--output-tokens", "4", "--json", str(file)]
        run("bench serve", *options)
        assert len(engine.ids()) == (12 if prompts == "documents" else 0)
    whole = json.loads(file.read_text())
    first, row = whole["rows"]
    assert (first["rate"], row["rate"]) == (None, 20.0)
    assert row["requests"] == len(arrivals(ServeSetting(**SMALL), 20.0))
    for each in (first, row):
        assert each["failed"] == 0
        assert 0 < each["ttft_p50_s"] <= each["ttft_p90_s"] <= each["ttft_p99_s"]
        assert 0 < each["tpot_p50_s"] <= each["tpot_p90_s"]
        assert each["output_rate"] > 0
        assert 0 <= each["goodput"] <= 1
        # Three chunks of 12 words, and the question.
        assert each["prompt_tokens"] > 50
    assert first["goodput"] == 1


def test_what_fails_is_counted(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # As few as possible, since what may be asked grows while they are.
    monkeypatch.setattr("cacheblend_lab.bench.serve._WARM_UP", 0)
    with engine_of(model, separator="\n\n") as engine, serving(engine, per_minute=14) as address:
        with ServeBench(ServeSetting(url=address, prompts="text", **SMALL)) as bench:
            _, row = bench.measure()
    # The names of the models were asked for, and the unloaded prompts.
    assert row.failed == row.requests - 1
    assert row.goodput <= 1 / row.requests


def test_what_cannot_be_asked_is_said(model: LlamaForCausalLM) -> None:
    with pytest.raises(ConfigError, match="does not say which model it has"):
        ServeBench(ServeSetting(url="http://127.0.0.1:9"))
    with engine_of(model) as engine, serving(engine, body_bytes=300) as address:
        with pytest.raises(ConfigError, match="did not store the corpus"):
            ServeBench(ServeSetting(url=address, **SMALL))
    for wrong in ({"prompts": "names"}, {"corpus": 3}, {"rates": (0.0,)}, {"seconds": 0}):
        with pytest.raises(ConfigError):
            ServeSetting(**wrong)
