"""Many processes on one folder: together, and forked."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from cacheblend_rag.store import check_store
from tests.store import workers
from tests.store.kit import key_of, make_kv, open_store, put, run, start


@pytest.mark.parametrize("disk_bytes", [None, 15_000])
def test_together(tmp_path: Path, disk_bytes: int | None) -> None:
    processes = [start(workers.work_together, tmp_path, seed, 80, disk_bytes) for seed in range(3)]
    workers.work_together(tmp_path, 99, 80, disk_bytes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    report = check_store(tmp_path)
    assert report.problems == []
    assert disk_bytes is None or report.bytes <= disk_bytes


def test_more_deletions_than_are_remembered(tmp_path: Path) -> None:
    store, other = open_store(tmp_path, 10**6), open_store(tmp_path, 0)
    put(store, *range(8))
    assert store.open(key_of(7)) is not None
    for number in range(6):
        other.discard(key_of(number))
    with closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as index:
        index.execute("DELETE FROM deletions WHERE seq <= (SELECT max(seq) FROM deletions) - 2")
    assert store.stats().ram_bytes == make_kv(6).nbytes + make_kv(7).nbytes


@pytest.mark.parametrize("in_folder", [True, False])
def test_use_after_a_fork_is_refused(tmp_path: Path, in_folder: bool) -> None:
    run(workers.use_after_fork, tmp_path if in_folder else None)
    assert not in_folder or check_store(tmp_path).entries == 2


def test_opening_twice_here_and_closing_elsewhere(tmp_path: Path) -> None:
    """Closing any file handle on the index would release this process's locks on it."""
    store, again = open_store(tmp_path, 0), open_store(tmp_path, 0)
    again.close()
    run(workers.put, tmp_path, 1)
    store.put(key_of(2), make_kv(2))
    run(workers.put, tmp_path, 3)
    assert store.holds([key_of(number) for number in (1, 2, 3)]) == [True] * 3
    store.close()
    assert check_store(tmp_path).entries == 3
    assert check_store(tmp_path).is_clean
