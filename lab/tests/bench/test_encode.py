"""The bench of adding on a tiny shape: every method does the same work, and the rows have every key."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from cacheblend_lab.bench.encode import EncodeBench, EncodeRow
from cacheblend_lab.bench.settings import EncodeSetting
from cacheblend_rag.errors import ConfigError
from tests.command import run

SETTING = EncodeSetting("tiny", chunks=5, chunk_tokens=12, prefix_tokens=3, batch_tokens=30, repeats=2)


def test_the_rows_are_complete() -> None:
    bench = EncodeBench(SETTING)
    assert [list(batch.shape) for batch in bench._batches] == [[2, 15], [2, 15], [1, 15]]
    calls: list[str] = []
    rows = bench.measure(calls.append)
    assert [row.method for row in rows] == ["forward", "ram", "disk"]
    assert calls == [f"measuring, {done} of 6" for done in range(1, 7)]
    assert rows[0].share == 1.0
    for row in rows:
        assert (row.tokens, row.batches) == (60, 3)
        assert row.tokens_per_s == pytest.approx(60 / row.seconds)
        assert 0 < row.seconds_min <= row.seconds <= row.seconds_max
    # Four layers, two heads of 16 for keys and for values, in float32.
    assert [row.kv_bytes for row in rows] == [0, 60 * 4 * 2 * 2 * 16 * 4, 60 * 4 * 2 * 2 * 16 * 4]


def test_documents_are_read_in_the_same_windows_by_every_method() -> None:
    setting = EncodeSetting("tiny", 8, 12, 3, 60, document_chunks=4, overlap=4, context_tokens=24, repeats=1)
    bench = EncodeBench(setting)
    # Of each document of 36 tokens two windows: the 8 tokens that a chunk leaves are more than a quarter, and not read again.
    assert [batch.shape[1] - 3 for batch in bench._batches for _ in batch] == [20] * 4
    rows = bench.measure()
    assert [row.method for row in rows] == ["forward", "ram", "disk", "singly"]
    assert {row.kv_bytes for row in rows[1:]} == {8 * 12 * 4 * 2 * 2 * 16 * 4}


def test_the_command_writes_every_row(tmp_path: Path) -> None:
    target = tmp_path / "encode.json"
    arguments = "bench encode --shape tiny --chunks 2 --chunk-tokens 8 --repeats 1"
    assert "tokens/s" in run(arguments, "--folder", tmp_path, "--json", target).output
    document = json.loads(target.read_text(encoding="utf-8"))
    assert [row["method"] for row in document["rows"]] == ["forward", "ram", "disk"]
    keys = {field.name for field in fields(EncodeRow)} | {"shape", "device", "dtype"}
    assert all(set(row) >= keys for row in document["rows"])
    assert [path.name for path in tmp_path.iterdir()] == ["encode.json"]


@pytest.mark.parametrize("name", ["chunks", "chunk_tokens", "prefix_tokens", "batch_tokens", "repeats"])
def test_nothing_can_be_measured_of_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0"):
        EncodeSetting("tiny", **{name: 0})
