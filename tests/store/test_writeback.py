"""Misses are written in the background, and what is deleted meanwhile stays deleted."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.errors import StoreFullError
from cacheblend_rag.store import check_store
from cacheblend_rag.store.tiers import DiskTier
from tests.store import workers
from tests.store.kit import files_of, held, is_held, key_of, make_kv, open_store, put_miss, record, run


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold every file back until the gate is opened."""
    opened = threading.Event()
    written = DiskTier.written

    def wait_and_write(self: DiskTier, *given: Any) -> Any:
        assert opened.wait(30)
        return written(self, *given)

    monkeypatch.setattr(DiskTier, "written", wait_and_write)
    yield opened
    opened.set()


def test_what_waits_is_as_good_as_written(tmp_path: Path, gate: threading.Event) -> None:
    store = open_store(tmp_path, 10**6)
    seen = store.names.changes("ns").mark
    for number in (1, 2, 3):
        put_miss(store, number)
    assert store.names.changes("ns").mark > seen
    assert files_of(tmp_path) == []
    keys = [key_of(number) for number in (1, 2, 3)]
    assert (store.holds(keys), store.holds(keys, durable=True)) == ([True] * 3, [False] * 3)
    assert store.names.lookup("ns", ["n2", "x"]) == [record("n2", 2), None]
    assert is_held(store, 2)
    assert store.stats().ram_bytes == sum(make_kv(number).nbytes for number in (1, 2, 3))
    threading.Timer(0.05, gate.set).start()
    # Which writes what waits.
    store.close()
    store = open_store(tmp_path, 0)
    assert store.names.ids("ns") == ["n1", "n2", "n3"]
    assert store.holds(keys, durable=True) == [True] * 3


def test_deleted_while_it_waits(tmp_path: Path, gate: threading.Event) -> None:
    store = open_store(tmp_path, 10**6)
    for number in range(1, 7):
        put_miss(store, number)
    store.name("ns", [record("one", 7), record("two", 7)])
    store.put_later(key_of(7), make_kv(7), "ns", {"one": None, "two": None})
    # What has no name is in RAM alone.
    store.cache(key_of(8), make_kv(8), "ns", ["met", "other"])
    store.cache(key_of(9), make_kv(9), "ns", ["unknown", "other"])
    assert store.holds([key_of(8)]) == [True] != store.holds([key_of(8)], durable=True)
    assert store.forget("ns", ["n1", "n2", "one", "unknown"]) == 3
    store.discard(key_of(3))
    for _ in range(2):
        assert held(store, range(10)) == [4, 5, 6, 7, 8]
        # The name of what was discarded stays.
        assert store.names.ids("ns") == ["n3", "n4", "n5", "n6", "two"]
        gate.set()
        store.flush()
    assert len(files_of(tmp_path)) == 4
    gate.clear()
    put_miss(store, 8)
    store.clear()
    gate.set()
    store.flush()
    assert store.names.ids("ns") == files_of(tmp_path) == []


def test_a_name_with_another_text_wins_over_what_waits(tmp_path: Path, gate: threading.Event) -> None:
    store = open_store(tmp_path, 10**6)
    put_miss(store, 1, "a")
    other = open_store(tmp_path, 0)
    other.name("ns", [record("a", 2)])
    # A miss of a text that was computed before that is not stored under its name either.
    put_miss(store, 3, "a")
    gate.set()
    store.flush()
    assert store.names.lookup("ns", ["a"]) == [record("a", 2)]
    assert held(store, range(4)) == files_of(tmp_path) == []


@pytest.mark.parametrize("room", [0, 2])
def test_what_has_no_room_to_wait_in_is_written_at_once(tmp_path: Path, gate: threading.Event, room: int) -> None:
    store = open_store(tmp_path, room * make_kv(1).nbytes)
    for number in (1, 3)[:room]:
        put_miss(store, number)
    threading.Timer(0.05, gate.set).start()
    put_miss(store, 5)
    assert store.holds([key_of(5)], durable=True) == [True]
    store.flush()
    assert len(files_of(tmp_path)) == room + 1


def test_the_first_error_is_raised_by_flush_once(tmp_path: Path) -> None:
    store = open_store(tmp_path, 10**6, disk_bytes=2 * 2600)
    store.put_later(key_of(1), make_kv(1, tokens=100), "ns", {}, record("n1", 1))
    put_miss(store, 2)
    with pytest.raises(StoreFullError):
        store.flush()
    store.flush()
    assert store.holds([key_of(1), key_of(2)], durable=True) == [False, True]
    # It is still in RAM, and goes with its name.
    assert store.open(key_of(1)) is not None
    store.forget("ns", ["n1"])
    assert store.open(key_of(1)) is None


def test_a_process_that_ends_writes_what_waits(tmp_path: Path) -> None:
    run(workers.end_without_closing, tmp_path)
    report = check_store(tmp_path)
    assert (report.entries, report.problems) == (8, [])
