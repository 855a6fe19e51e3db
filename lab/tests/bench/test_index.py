"""The bench of the store's index measures what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheblend_lab.bench.index import IndexBench, make_index
from cacheblend_lab.bench.settings import IndexSetting
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import open_store


def test_a_small_index(tmp_path: Path) -> None:
    seen: list[str] = []
    (row,) = IndexBench(IndexSetting((500,), 100, tmp_path / "stores")).measure(seen.append)
    assert (row.entries, seen) == (500, ["measuring, 0 of 1"])
    assert 0 < row.lookup_p50_s <= row.lookup_p99_s <= row.lookup_max_s
    assert row.file_bytes == (tmp_path / "stores" / "500" / "index.sqlite").stat().st_size
    store = open_store(tmp_path / "stores" / "500", 0)
    stats = store.stats()
    assert (stats.entries, stats.nodes, stats.disk_bytes) == (500, 500, 500 * 64)
    store.close()


def test_the_same_rows_again_change_nothing(tmp_path: Path) -> None:
    make_index(tmp_path, 50)
    make_index(tmp_path, 80)
    store = open_store(tmp_path, 0)
    assert (store.stats().entries, store.stats().nodes) == (80, 80)
    store.close()


def test_what_has_no_meaning(tmp_path: Path) -> None:
    for sizes, lookups in (((), 100), ((7,), 100), ((100,), 9)):
        with pytest.raises(ConfigError):
            IndexSetting(sizes, lookups)
    (tmp_path / "x").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        IndexSetting((10,), folder=tmp_path)
