"""The load bench on a tiny shape: the loader beside plain reads of the same files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cacheblend_lab.bench.load import LoadBench
from cacheblend_lab.bench.settings import LoadSetting
from cacheblend_lab.bench.tiers import cached_share, drop_cached
from cacheblend_rag.errors import ConfigError
from tests.command import run


def test_the_loader_is_measured_beside_plain_reads(tmp_path: Path) -> None:
    calls: list[str] = []
    setting = LoadSetting("tiny", chunks=3, chunk_tokens=20, threads=(0, 2), repeats=2, folder=tmp_path)
    with LoadBench(setting) as bench:
        # Four layers of two heads of sixteen, keys and values, in float32, and a head for each file.
        assert bench.file_bytes > 3 * 20 * 4 * 2 * 2 * 16 * 4
        rows = bench.measure(calls.append)
    assert [(row.method, row.threads) for row in rows] == [("plain reads", None), ("loader", 0), ("loader", 2)]
    assert rows[0].of_plain_reads == 1
    for row in rows:
        assert 0 < row.seconds_min <= row.seconds <= row.seconds_max
        assert row.bytes_per_s > 0 and row.of_plain_reads > 0
    assert calls[-1] == "measuring, 9 of 9"
    assert not list(tmp_path.iterdir())


def test_the_command_writes_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    arguments = "bench load --shape tiny --chunks 2 --chunk-tokens 16 --threads 1 --repeats 1"
    assert "plain reads" in run(arguments, "--folder", tmp_path, "--json", file).stdout
    whole = json.loads(file.read_text())
    assert [(row["method"], row["threads"]) for row in whole["rows"]] == [("plain reads", None), ("loader", 1)]
    assert whole["setting"]["folder"] == str(tmp_path)
    assert "cached_share_after_drop" in whole["setting"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"threads": ()}, "numbers of threads"),
        ({"threads": (1, -1)}, "numbers of threads"),
    ],
)
def test_nothing_cannot_be_measured(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoadSetting("tiny", **changes)  # type: ignore[arg-type]


def test_threads_that_are_no_numbers_are_refused() -> None:
    result = run("bench load --shape tiny --threads 1,many", code=2)
    assert "'many' in '1,many' is not a whole number; write numbers like 0,1,2,4" in result.output


def test_which_pages_are_in_memory_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "pages"
    file.write_bytes(bytes(10 * 4096 + 7))
    drop_cached([file])
    after = cached_share([file])
    file.read_bytes()
    before = cached_share([file])
    # On a file system that lives in memory nothing can be dropped.
    assert (before, after) in [(1.0, 0.0), (1.0, 1.0), (None, None)]
    assert cached_share([]) is None
