"""The prefetch bench on a tiny shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cacheblend_lab.bench.prefetch import PrefetchBench
from cacheblend_lab.bench.settings import PrefetchSetting
from cacheblend_rag.errors import ConfigError
from tests.command import run


def test_each_method_reads_from_where_it_should(tmp_path: Path) -> None:
    calls: list[str] = []
    # Time enough to read everything.
    setting = PrefetchSetting(
        "tiny", candidates=4, chunks=2, chunk_tokens=20, reranker_s=1.0, repeats=1, folder=tmp_path
    )
    with PrefetchBench(setting) as bench:
        # Four layers of two heads of sixteen, keys and values, in float32, for each candidate.
        assert bench.file_bytes > 4 * 20 * 4 * 2 * 2 * 16 * 4
        rows = bench.measure(calls.append)
    assert [row.method for row in rows] == ["disk", "prefetch", "ram"]
    assert [row.tiers for row in rows] == [{"disk": 2}, {"ram": 2}, {"ram": 2}]
    assert rows[0].of_disk == 1
    for row in rows:
        assert 0 < row.ttft_min_s <= row.ttft_s <= row.ttft_max_s
        assert row.total_s >= row.ttft_s + 1.0
    assert calls[-1] == "measuring, 6 of 6"
    assert not list(tmp_path.iterdir())


def test_the_command_writes_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "prefetch.json"
    arguments = "bench prefetch --shape tiny --candidates 3 --chunks 2 --chunk-tokens 16 --reranker-ms 50 --repeats 1"
    run(arguments, "--folder", tmp_path, "--json", file)
    whole = json.loads(file.read_text())
    assert [row["method"] for row in whole["rows"]] == ["disk", "prefetch", "ram"]
    assert whole["setting"]["reranker_s"] == 0.05
    assert "cached_share_after_drop" in whole["setting"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"chunks": 5, "candidates": 4}, "chunks=5 cannot be chosen from candidates=4"),
        ({"reranker_s": -1.0}, "reranker_s=-1.0 must be at least 0"),
    ],
)
def test_nothing_cannot_be_measured(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrefetchSetting("tiny", **changes)  # type: ignore[arg-type]
