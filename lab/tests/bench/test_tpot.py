"""The bench of eviction on a tiny shape: the figures are complete and those of the settings."""

import json
from pathlib import Path

import pytest

from cacheblend_lab.bench.settings import TPOTSetting
from cacheblend_lab.bench.tpot import TPOTBench
from cacheblend_rag.errors import CacheBlendError, ConfigError
from tests.command import run

TOKEN_BYTES = 4 * 2 * 2 * 16 * 4


def test_the_rows_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    # The environment says nothing here.
    monkeypatch.setenv("CACHEBLEND_KV_CAPACITY", "1")
    monkeypatch.setenv("CACHEBLEND_ENABLED", "false")
    calls: list[str] = []
    setting = TPOTSetting("tiny", 3, 20, 5, output_tokens=4, capacities=(0.25, 7), selector="hkvd", repeats=2)
    with TPOTBench(setting) as bench:
        rows = bench.measure(calls.append)
        assert len(bench.token_ids) == 1 + 60 + 5
    assert calls[-1] == "measuring, 18 of 18"
    kept = {None: 60, 0.25: 15, 7: 7}
    assert [(row.method, row.kv_capacity) for row in rows] == [(m, c) for m in ("full", "blend") for c in kept]
    for row in rows:
        assert row.evicted_tokens == 60 - kept[row.kv_capacity]
        assert row.kv_bytes == (6 + kept[row.kv_capacity]) * TOKEN_BYTES
        assert row.kv_bytes_before == 66 * TOKEN_BYTES
        assert 0 < row.tpot_min_s <= row.tpot_s <= row.tpot_max_s
        assert row.ttft_s > 0
        assert row.output_tokens == 4
        if row.kv_capacity is None:
            assert (row.tpot_speedup, row.ttft_added) == (1, 0)


def test_the_command_writes_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "tpot.json"
    arguments = "bench tpot --shape tiny --chunks 2 --chunk-tokens 16 --question-tokens 4 --output-tokens 3 --repeats 1"
    run(arguments, "--capacities", "0.25,9", "--json", file)
    whole = json.loads(file.read_text())
    assert whole["setting"]["prompt_tokens"] == 37
    assert [(row["method"], row["kv_capacity"], row["evicted_tokens"]) for row in whole["rows"]] == [
        (method, *row) for method in ("full", "blend") for row in ((None, 0), (0.25, 24), (9, 23))
    ]


def test_what_cannot_be_measured() -> None:
    for name, value, message in (
        *(
            (name, 0, f"{name}=0 must be at least 1")
            for name in ("chunks", "chunk_tokens", "question_tokens", "repeats")
        ),
        ("output_tokens", 1, "output_tokens=1 must be at least 2"),
        ("methods", ("full", "half"), "method 'half' is not measured; choose among full, blend"),
    ):
        with pytest.raises(ConfigError, match=message):
            TPOTSetting("tiny", **{name: value})


def test_settings_without_meaning_are_refused_before_the_model_is_made() -> None:
    for setting, message in (
        (TPOTSetting("tiny", capacities=(2.0,)), "kv_capacity=2.0"),
        (TPOTSetting("round"), "shape 'round' is unknown"),
    ):
        with pytest.raises(CacheBlendError, match=message):
            TPOTBench(setting)
