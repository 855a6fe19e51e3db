"""Misses are written in the background, and what is deleted meanwhile stays deleted."""

import logging
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cacheblend_rag import BlendPrompt, Chunk
from cacheblend_rag.errors import StoreError, StoreFullError
from cacheblend_rag.store import KVStore, check_store
from cacheblend_rag.store.folder import StoreFolder
from tests.engines import MakeEngine
from tests.families import words
from tests.store import workers
from tests.store.kit import files_of, is_held, key_of, make_kv, open_store, record, run

ROOM = 10**6


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold every file back until the gate is opened."""
    opened = threading.Event()
    write = StoreFolder.write

    def wait_and_write(self: StoreFolder, buffers: list[memoryview]) -> Path:
        assert opened.wait(30)
        return write(self, buffers)

    monkeypatch.setattr(StoreFolder, "write", wait_and_write)
    yield opened
    opened.set()


def later(store: KVStore, number: int, node: str = "", *, is_known: bool = False) -> bool:
    node = node or f"n{number}"
    records = [] if is_known else [record(node, number)]
    return store.put_later(key_of(number), make_kv(number), "ns", records, {node: None} if is_known else {})


def test_what_waits_is_as_good_as_written(tmp_path: Path, gate: threading.Event) -> None:
    store = open_store(tmp_path, 10**6, write_back_bytes=ROOM)
    seen = store.names.revision()
    assert all(later(store, number) for number in (1, 2, 3))
    assert store.names.revision() > seen
    assert files_of(tmp_path) == []
    keys = [key_of(number) for number in (1, 2, 3)]
    assert store.holds(keys) == [True] * 3
    assert store.holds(keys, durable=True) == [False] * 3
    assert store.names.ids("ns") == ["n1", "n2", "n3"]
    assert store.names.lookup("ns", ["n2", "x"]) == [record("n2", 2), None]
    assert is_held(store, 2)
    stats = store.stats()
    assert (stats.waiting, stats.waiting_bytes) == (3, sum(make_kv(n).nbytes for n in (1, 2, 3)))
    gate.set()
    store.flush()
    stats = store.stats()
    assert (stats.waiting, stats.waiting_bytes, stats.entries, stats.nodes) == (0, 0, 3, 3)
    assert store.holds(keys, durable=True) == [True] * 3
    store.close()
    store = open_store(tmp_path, 0)
    assert store.names.ids("ns") == ["n1", "n2", "n3"]
    assert store.holds(keys) == [True] * 3
    store.close()
    assert check_store(tmp_path).is_clean


def test_deleted_while_it_waits(tmp_path: Path, gate: threading.Event) -> None:
    store = open_store(tmp_path, 10**6, write_back_bytes=ROOM)
    for number in range(1, 7):
        later(store, number)
    store.put_later(key_of(7), make_kv(7), "ns", [record("one", 7), record("two", 7)])
    assert store.forget("ns", ["n1", "n2", "one", "unknown"]) == 3
    store.discard(key_of(3))
    # Its name stays.
    assert store.names.ids("ns") == ["n3", "n4", "n5", "n6", "two"]
    assert [store.open(key_of(number)) is not None for number in range(1, 8)] == [False] * 3 + [True] * 4
    gate.set()
    store.flush()
    assert store.holds([key_of(number) for number in range(1, 8)]) == [False] * 3 + [True] * 4
    assert store.names.ids("ns") == ["n3", "n4", "n5", "n6", "two"]
    assert len(files_of(tmp_path)) == 4
    gate.clear()
    later(store, 8)
    store.clear()
    gate.set()
    store.flush()
    assert store.names.ids("ns") == files_of(tmp_path) == []
    store.close()
    assert check_store(tmp_path).is_clean


def test_a_name_with_another_text_wins_over_what_waits(tmp_path: Path, gate: threading.Event) -> None:
    store = open_store(tmp_path, 10**6, write_back_bytes=ROOM)
    later(store, 1, "a")
    other = open_store(tmp_path, 0)
    other.name("ns", [record("a", 2)])
    # A miss of a text that was computed before that is not stored under its name either.
    later(store, 3, "a")
    assert store.names.lookup("ns", ["a"]) == [record("a", 2)]
    gate.set()
    store.flush()
    assert store.names.lookup("ns", ["a"]) == [record("a", 2)]
    assert store.holds([key_of(1), key_of(3)]) == [False, False]
    assert files_of(tmp_path) == []


@pytest.mark.parametrize("deleter", ["the same", "another"])
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("turns", [40, pytest.param(400, marks=pytest.mark.full)])
def test_never_resurrected(tmp_path: Path, is_known: bool, deleter: str, turns: int) -> None:
    """The deletion falls before, into or after the writing, at random."""
    chance = random.Random(7)
    store, other = open_store(tmp_path, 10**6, write_back_bytes=ROOM), open_store(tmp_path, 0)
    forgetting = store if deleter == "the same" else other
    early = 0
    for turn in range(turns):
        if is_known:
            store.name("ns", [record(f"n{turn}", turn)])
        later(store, turn, is_known=is_known)
        later(store, 10_000 + turn)
        time.sleep(chance.uniform(0, 0.03))
        early += not files_of(tmp_path)
        assert forgetting.forget("ns", [f"n{turn}"]) == 1
        assert store.names.lookup("ns", [f"n{turn}"]) == [None]
        if forgetting is store:
            assert store.open(key_of(turn)) is None
        store.flush()
        assert store.holds([key_of(turn), key_of(10_000 + turn)]) == [False, True]
        assert store.open(key_of(turn)) is None
        assert store.forget("ns", [f"n{10_000 + turn}"]) == 1
    assert files_of(tmp_path) == []
    assert early < turns
    store.close()
    other.close()
    assert check_store(tmp_path).is_clean


def test_a_queue_has_an_end(tmp_path: Path, gate: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    size = make_kv(1).nbytes
    store = open_store(tmp_path, 10**6, write_back_bytes=2 * size)
    with caplog.at_level(logging.WARNING):
        assert [later(store, number) for number in (1, 3, 5, 7)] == [True, True, False, False]
    assert caplog.text.count("exceeds write_back_bytes") == 1
    assert store.stats().unwritten == 2
    assert store.open(key_of(5)) is None
    gate.set()
    store.flush()
    assert later(store, 5)
    store.close()
    assert len(files_of(tmp_path)) == 3


def test_the_first_error_is_raised_by_flush_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path, 10**6, disk_bytes=2 * 2600, write_back_bytes=ROOM)
    store.put_later(key_of(1), make_kv(1, tokens=100), "ns", [record("n1", 1)])
    later(store, 2)
    with pytest.raises(StoreFullError, match="disk_bytes"):
        store.flush()
    store.flush()
    assert store.holds([key_of(1), key_of(2)]) == [False, True]
    # It is still in RAM, and goes with its name.
    assert store.open(key_of(1)) is not None
    store.forget("ns", ["n1"])
    assert store.open(key_of(1)) is None
    assert caplog.text.count("was not stored") == 1


def test_closing_writes_what_waits(tmp_path: Path, gate: threading.Event) -> None:
    store = open_store(tmp_path, 0, write_back_bytes=ROOM)
    later(store, 1)
    threading.Timer(0.05, gate.set).start()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        later(store, 2)
    store = open_store(tmp_path, 0)
    assert store.holds([key_of(1)]) == [True]


def test_a_process_that_ends_writes_what_waits(tmp_path: Path) -> None:
    run(workers.end_without_closing, tmp_path)
    store = open_store(tmp_path, 0)
    assert store.holds([key_of(number) for number in range(8)]) == [True] * 8
    store.close()
    assert check_store(tmp_path).is_clean


def test_an_addition_is_durable_whatever_waits(make_engine: MakeEngine, tmp_path: Path, gate: threading.Event) -> None:
    chunks = [Chunk(words(20, 1), "a"), Chunk(words(21, 2), "b")]
    engine = make_engine(tmp_path)
    assert engine.prefill(BlendPrompt("t1", chunks, "t2")).report.misses == 2
    assert sorted(engine.ids()) == ["a", "b"]
    # The answer did not wait, and the next one hits.
    assert files_of(tmp_path) == []
    assert engine.prefill(BlendPrompt("t1", chunks, "t2")).report.hits == 2
    assert engine.delete(["b"]) == 1
    assert engine.ids() == ["a"]
    threading.Timer(0.05, gate.set).start()
    result = engine.add(chunks)
    # Of "a", the KV that serves it behind others is new.
    assert (result.encoded, result.unchanged) == (2, 0)
    assert len(files_of(tmp_path)) == 4
    engine.flush()


def test_without_room_to_wait_the_answer_waits(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, write_back_bytes=0)
    engine.prefill(BlendPrompt("t1", [Chunk(words(20, 1), "a")], "t2"))
    assert len(files_of(tmp_path)) == 1
    assert engine._store.stats().waiting == 0


def test_a_miss_that_waits_goes_with_its_source(tmp_path: Path, gate: threading.Event) -> None:
    store = open_store(tmp_path, 10**6, write_back_bytes=ROOM)
    store.name("ns", [replace(record("n1", 1), source="d", indexed=True)])
    assert store.put_later(key_of(2), make_kv(2), "ns", [replace(record("met", 2), source="d")])
    assert store.forget("ns", ["n1"]) == 2
    gate.set()
    store.flush()
    assert (store.names.ids("ns"), store.holds([key_of(2)])) == ([], [False])
