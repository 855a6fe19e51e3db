"""Many processes on one folder: together, killed, and forked."""

import random
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from cacheblend_rag.store import check_store
from tests.store import workers
from tests.store.kit import add, files_of, is_held, key_of, make_kv, open_store, put, record, run, start


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


def test_opening_while_others_write(tmp_path: Path) -> None:
    open_store(tmp_path, 0).close()
    writers = [
        start(workers.write_until_killed, tmp_path, tmp_path.with_name(f"log{n}"), 1000 * n, None) for n in range(2)
    ]
    for _ in range(60):
        open_store(tmp_path, 0).close()
    for writer in writers:
        assert writer.exitcode is None
        writer.kill()


@pytest.mark.parametrize("disk_bytes", [None, 40_000])
def test_killed(tmp_path: Path, disk_bytes: int | None) -> None:
    chance = random.Random(disk_bytes)
    put: set[int] = set()
    last: set[int] = set()
    for turn in range(5):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        process = start(workers.write_until_killed, tmp_path / "s", log, 1000 * turn, disk_bytes)
        waited_until = time.monotonic() + 30
        while not log.exists() and time.monotonic() < waited_until:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.08))
        process.kill()
        process.join()
        logged = {int(line) for line in log.read_text().split()}
        put |= logged
        # After the last line of each turn something may have been begun and not finished.
        last.add(max(logged, default=-1))
        store = open_store(tmp_path / "s", 0, disk_bytes)
        held = {number for number in put if store.holds([key_of(number)])[0]}
        assert held == put or disk_bytes is not None
        assert not any(store.holds([key_of(10**6 + number) for number in put - last]))
        files = {file.stem for file in files_of(tmp_path / "s")}
        # A file goes before its entry does: killed between, while it discarded or made room, it leaves a miss.
        for number in held:
            assert is_held(store, number) or (disk_bytes is not None and key_of(number) not in files)
        for number in last:
            assert store.open(key_of(10**6 + number)) is None or key_of(10**6 + number) in files
        assert store.names.lookup("ns", [f"n{n}" for n in sorted(put)[:-1]]) == [
            record(f"n{n}", n) for n in sorted(put)[:-1]
        ]
        store.close()
        report = check_store(tmp_path / "s")
        assert report.problems == []
        assert disk_bytes is None or report.bytes <= disk_bytes


def test_killed_while_another_goes_on(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s", 10_000)
    process = start(workers.write_until_killed, tmp_path / "s", tmp_path / "log", 0, None)
    while not (tmp_path / "log").exists():
        store.put(key_of(1), make_kv(1))
        store.discard(key_of(1))
    process.kill()
    process.join()
    store.put(key_of(1), make_kv(1))
    # Whoever opens it next cleans up, whether or not others have it open.
    open_store(tmp_path / "s", 0).close()
    assert check_store(tmp_path / "s").problems == []
    assert store.holds([key_of(1)]) == [True]


def test_deletions_by_others_are_noticed_in_ram(tmp_path: Path) -> None:
    store = open_store(tmp_path, 10**6)
    add(store, *range(3))
    run(workers.drop, tmp_path, "n1")
    assert store.stats().ram_bytes == make_kv(0).nbytes + make_kv(2).nbytes
    assert store.open(key_of(1)) is None
    assert store.open(key_of(0)) is not None
    run(workers.put, tmp_path, 1)
    assert is_held(store, 1)
    store.close()
    assert len(files_of(tmp_path)) == 3


def test_more_deletions_than_are_remembered(tmp_path: Path) -> None:
    store, other = open_store(tmp_path, 10**6), open_store(tmp_path, 0)
    put(store, *range(8))
    assert store.open(key_of(7)) is not None
    for number in range(6):
        other.discard(key_of(number))
    with closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as index:
        index.execute("DELETE FROM deletions WHERE seq <= (SELECT max(seq) FROM deletions) - 2")
    assert store.stats().ram_bytes == make_kv(6).nbytes + make_kv(7).nbytes


def test_two_put_the_same(tmp_path: Path) -> None:
    one, two = open_store(tmp_path, 0), open_store(tmp_path, 0)
    for number in range(3):
        one.put(key_of(number), make_kv(number))
        two.put(key_of(number), make_kv(number))
    assert len(files_of(tmp_path)) == 3
    one.close()
    two.put(key_of(1), make_kv(1))
    two.close()
    assert check_store(tmp_path).is_clean


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
