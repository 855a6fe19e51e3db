"""The bench of batches on the reference model: the figures are complete and the answers the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cacheblend_lab.bench.batch import BatchBench
from cacheblend_lab.bench.settings import BatchSetting
from cacheblend_rag.errors import ConfigError
from tests.command import run


def test_the_rows_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    # The environment says nothing here.
    monkeypatch.setenv("CACHEBLEND_ENABLED", "false")
    monkeypatch.setenv("CACHEBLEND_SELECTOR", "hkvd(repair=0.5)")
    calls: list[str] = []
    with BatchBench(BatchSetting(prompts=3, chunks=2, chunk_tokens=16, output_tokens=4, repeats=2)) as bench:
        rows = bench.measure(calls.append)
    assert calls[-1] == "measuring, 9 of 9"
    assert [(row.method, row.batch_size) for row in rows[:2]] == [("one by one", 1), ("batch", 3)]
    assert rows[2].method == "callers"
    for row in rows:
        assert 0 < row.elapsed_min_s <= row.elapsed_s <= row.elapsed_max_s
        assert row.tokens_per_s == pytest.approx(4 * row.prompts_per_s)
        assert row.prefill_s > 0 and row.decode_s > 0
        assert row.prefill_s + row.decode_s < 2 * row.elapsed_max_s
        assert row.hits == 6
        assert row.equal_answers == 3
    assert rows[0].speedup == 1


def test_the_command_writes_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "batch.json"
    arguments = "bench batch --prompts 2 --chunks 1 --chunk-tokens 16 --output-tokens 2 --repeats 1"
    run(arguments, "--json", file)
    whole = json.loads(file.read_text())
    assert whole["model"] == "reference"
    assert [row["method"] for row in whole["rows"]] == ["one by one", "batch", "callers"]


@pytest.mark.parametrize("name", ["prompts", "chunks", "chunk_tokens", "question_tokens", "output_tokens", "repeats"])
def test_nothing_cannot_be_measured(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0 must be at least"):
        BatchSetting(**{name: 0})  # type: ignore[arg-type]


def test_without_langchain_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in the table of modules makes an import of that name fail.
    monkeypatch.delitem(sys.modules, "cacheblend_lab.bench.batch", raising=False)
    monkeypatch.setitem(sys.modules, "langchain_cacheblend", None)
    assert 'pip install "cacheblend-rag[langchain]"' in run("bench batch", code=2).output
