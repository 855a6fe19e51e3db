"""`bench codecs`: every codec has its row, and its bytes and errors are those of the KV that it packed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from cacheblend_lab.bench.codecs import CodecBench
from cacheblend_lab.bench.settings import CodecSetting
from cacheblend_rag.codec import codec_names
from cacheblend_rag.errors import ConfigError
from tests.command import run


def test_the_rows() -> None:
    setting = CodecSetting("tiny", chunk_tokens=64, repeats=2)
    rows = {row.codec: row for row in CodecBench(setting).measure()}
    assert tuple(rows) == codec_names()
    assert (rows["native"].rms_error, rows["native"].max_error) == (0, 0)
    narrower = [rows[name] for name in ("native", "float16", "int8", "int4", "int2")]
    for wide, narrow in pairwise(narrower):
        assert wide.file_bytes > narrow.file_bytes
        assert wide.rms_error < narrow.rms_error <= narrow.max_error
    for row in rows.values():
        assert min(row.pack_bytes_per_s, row.unpack_bytes_per_s, row.copy_bytes_per_s) > 0
    # 4 layers, keys and values, 2 heads of 16 numbers a token; the file's head comes on top.
    numbers = 4 * 2 * 64 * 2 * 16
    assert rows["native"].file_bytes == pytest.approx(4 * numbers, rel=0.05)
    assert rows["native"].share_of_float16 == rows["native"].file_bytes / (2 * numbers)


def test_the_command_writes_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "codecs.json"
    result = run("bench codecs --shape tiny --chunk-tokens 40 --repeats 1 --dtype bfloat16", "--json", file)
    assert "copying runs at" in result.stdout
    whole = json.loads(file.read_text())
    assert [row["codec"] for row in whole["rows"]] == list(codec_names())
    assert all(row.keys() == whole["rows"][0].keys() for row in whole["rows"])


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ConfigError, match="chunk_tokens=0 must be at least 1"):
        CodecSetting(chunk_tokens=0)
    with pytest.raises(ConfigError, match="dtype 'int8' is unknown"):
        CodecSetting(dtype="int8")
    with pytest.raises(ConfigError, match="shape 'huge' is unknown"):
        CodecBench(CodecSetting("huge"))
