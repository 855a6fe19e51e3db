"""What every store promises beyond what the machine draws: odd names, readers, threads, processes, privacy."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import KVStore, NodeRecord, check_store, names
from tests.store import workers
from tests.store.kit import (
    add,
    files_of,
    key_of,
    make_kv,
    open_store,
    opened,
    piece,
    put,
    read,
    record,
    run,
    same,
    start,
)


@pytest.fixture(params=["ram", "folder", "folder without ram"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KVStore:
    location = None if request.param == "ram" else tmp_path / "store"
    return open_store(location, 0 if request.param == "folder without ram" else 10**6)


def test_documents_are_read_by_their_places_and_tables_are_none(
    monkeypatch: pytest.MonkeyPatch, store: KVStore
) -> None:
    monkeypatch.setattr(names, "MOST_UNPLACED", 3)
    rows = [NodeRecord(str(number), key_of(number), "", (number,), (), "table") for number in range(4)]
    store.name("ns", rows[:3])
    assert store.names.members("ns", "table") == rows[:3]
    store.name("ns", rows)
    assert (store.names.members("ns", "table"), store.names.document("ns", "table")) == ([], ["0", "1", "2", "3"])
    # What says where it begins comes first, and what comes anew last.
    store.name("ns", [piece("5", "table", 10), piece("4", "table", 0), record("1", 1)])
    store.name("ns", [rows[1]])
    assert [each.id for each in store.names.members("ns", "table")] == ["4", "5", "0", "2", "3", "1"]


def test_odd_names(store: KVStore) -> None:
    odd = ["", "a\0b", "ü" * 500, "'; DROP TABLE nodes; --", "%", "A", "a"]
    records = [NodeRecord(name, key_of(1), "", ()) for name in odd]
    store.name("", records)
    assert store.names.lookup("", odd) == records
    # Replaced names keep their place.
    store.name("", records[:2])
    assert store.names.ids("") == odd
    assert store.forget("", [*odd, "unknown", "a"]) == len(odd)
    for use in (
        lambda: store.name("ns", [record("\ud800", 1)]),
        lambda: store.names.lookup("ns", ["\ud800"]),
        lambda: store.put("../../../../etc/passwd", make_kv(1)),
        lambda: store.open("AB" * 16),
        lambda: store.open("ab" * 16 + "\n"),
    ):
        with pytest.raises(StoreError):
            use()


def test_a_reader_outlives_its_entry(store: KVStore) -> None:
    add(store, 1)
    reader = opened(store, key_of(1))
    reader.layer(0)
    store.forget("ns", ["n1"])
    assert same(read(reader), make_kv(1))
    assert store.open(key_of(1)) is None
    assert store.stats().ram_bytes == store.stats().disk_bytes == 0


def test_closed(store: KVStore) -> None:
    store.close()
    store.close()
    for use in (
        lambda: store.open(key_of(1)),
        lambda: store.put(key_of(1), make_kv(1)),
        lambda: store.put_later(key_of(1), make_kv(1), "ns", {}, record("a", 1)),
        lambda: store.holds([key_of(1)]),
        lambda: store.discard(key_of(1)),
        lambda: store.name("ns", [record("a", 1)]),
        lambda: store.names.lookup("ns", ["a"]),
        lambda: store.forget("ns", ["a"]),
        lambda: store.clear(),
        lambda: store.stats(),
    ):
        with pytest.raises(StoreError):
            use()


def test_many_threads(store: KVStore) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: workers.work(store, seed, 40), range(4)))


@pytest.mark.parametrize("disk_bytes", [None, 15_000])
def test_many_processes(tmp_path: Path, disk_bytes: int | None) -> None:
    processes = [start(workers.work_together, tmp_path, seed, 80, disk_bytes) for seed in range(3)]
    workers.work_together(tmp_path, 99, 80, disk_bytes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    report = check_store(tmp_path)
    assert report.problems == []
    assert disk_bytes is None or report.bytes <= disk_bytes


def test_opening_twice_here_and_closing_elsewhere(tmp_path: Path) -> None:
    """Closing any file handle on the index would release this process's locks on it."""
    store, again = open_store(tmp_path, 0), open_store(tmp_path, 0)
    again.close()
    run(workers.write_some, tmp_path, [1])
    put(store, 2)
    run(workers.write_some, tmp_path, [3])
    assert store.holds([key_of(number) for number in (1, 2, 3)]) == [True] * 3


@pytest.mark.parametrize("in_folder", [True, False])
def test_use_after_a_fork_is_refused(tmp_path: Path, in_folder: bool) -> None:
    run(workers.use_after_fork, tmp_path if in_folder else None)
    assert not in_folder or check_store(tmp_path).entries == 2


def test_nobody_else_reads_it_and_what_is_deleted_is_gone(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s", 0)
    store.name("ns", [record("a very personal name", 1)])
    put(store, 1)
    for path in (tmp_path / "s").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    store.forget("ns", ["a very personal name"])
    store.close()
    assert not any(b"personal" in file.read_bytes() for file in (tmp_path / "s").iterdir() if file.is_file())
    left = sorted(path.name for path in (tmp_path / "s").iterdir())
    assert left == ["index.sqlite", "kv", "reserve", "store.json", "store.lock", "tmp"]


def test_who_asks_for_changes_too_late_gets_all(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0)
    store.name("ns", [record("old", 1)])
    mark = store.names.changes("ns").mark
    store.name("ns", [record(str(number), 2) for number in range(10_000)])
    assert not store.names.changes("ns", mark).whole
    store.name("ns", [record("one more", 2)])
    changes = store.names.changes("ns", mark)
    assert changes.whole and len(changes.names) == 10_002
    # A mark of another index, which was further on.
    assert store.names.changes("ns", changes.mark + 5).whole


@pytest.mark.parametrize("part", ["kv", "tmp"])
def test_a_part_of_the_folder_that_is_deleted_while_in_use(tmp_path: Path, part: str) -> None:
    store = open_store(tmp_path, 10**6)
    add(store, *range(5))
    shutil.rmtree(tmp_path / part)
    put(store, *range(5))
    assert len(files_of(tmp_path)) == 5
    store.close()
    assert check_store(tmp_path).is_clean
