"""The bench of finding chunks: its figures are complete, and nothing is lost or made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cacheblend_lab.bench.find import FindBench
from cacheblend_lab.bench.settings import FindSetting
from cacheblend_rag.errors import ConfigError
from tests.command import run


@pytest.mark.parametrize("heading", [False, True])
def test_every_chunk_is_found_and_no_edited_one(heading: bool) -> None:
    bench = FindBench(FindSetting(chunks=200, prompts=100, prompt_chars=2000, heading=heading))
    assert len({*bench.texts}) == 200
    said: list[str] = []
    (row,) = bench.measure(said.append)
    assert row.found == row.placed == row.edited > 300
    assert row.false_hits == 0
    assert 0 < row.p50_s <= row.p99_s <= row.max_s
    assert min(row.open_s, row.after_add_s, row.after_other_s, row.after_delete_s) > 0
    assert row.mean_prompt_chars > 2000
    assert len(said) == 4


def test_the_command_writes_its_row(tmp_path: Path) -> None:
    file = tmp_path / "find.json"
    run("bench find --chunks 50 --prompts 100 --prompt-chars 500 --heading", "--json", file)
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["chunks"], row["heading"], row["false_hits"]) == (50, True, 0)
    assert row["found"] == row["placed"]


def test_what_cannot_be_measured() -> None:
    with pytest.raises(ConfigError, match="chunks=15 must be at least 16"):
        FindSetting(chunks=15)
    with pytest.raises(ConfigError, match="prompts=99 must be at least 100"):
        FindSetting(prompts=99)
