"""``bench encode`` on a tiny shape: the figures are complete, and both KVs of a chunk are stored."""

from pathlib import Path

import pytest

from cacheblend_lab.bench.encode import EncodeBench
from cacheblend_lab.bench.settings import EncodeSetting

# Four layers of two heads of sixteen, keys and values, in float32.
TOKEN_BYTES = 4 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("document_chunks", [0, 3])
def test_the_rows_are_complete(document_chunks: int, tmp_path: Path) -> None:
    said: list[str] = []
    setting = EncodeSetting(
        "tiny", chunks=7, chunk_tokens=20, document_chunks=document_chunks, folder=tmp_path, repeats=2
    )
    rows = {row.method: row for row in EncodeBench(setting).measure(said.append)}
    assert list(rows) == ["forward", "once", "ram", "disk", "singly"]
    assert said[-1] == "measuring, 10 of 10"
    for row in rows.values():
        assert row.tokens == 140 and 0 < row.seconds_min <= row.seconds <= row.seconds_max
        assert row.tokens_per_s == pytest.approx(140 / row.seconds)
    assert rows["forward"].of_forward == rows["once"].of_once == 1
    assert [row.kv_bytes / (140 * TOKEN_BYTES) for row in rows.values()] == [0, 1, 2, 2, 2]
    assert [row.bytes_of_once for row in rows.values()] == [0, 1, 2, 2, 2]
    assert not list(tmp_path.iterdir())
