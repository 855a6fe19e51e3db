"""An index that is damaged or lost is begun anew; KV is found by its files, and what was deleted stays so."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheblend_rag import BlendPrompt, Chunk
from cacheblend_rag.store import KVStore, check_store
from cacheblend_rag.store.database import DamagedIndexError
from tests.engines import MakeEngine
from tests.families import words
from tests.store.kit import files_of, is_held, key_of, make_kv, open_store, record

CHUNKS = [Chunk(words(20, number), f"n{number}", document="dddx"[number], start=100 * number) for number in range(4)]


@pytest.fixture
def live(tmp_path: Path) -> KVStore:
    store = open_store(tmp_path / "store", 10**6)
    for number in range(5):
        store.put(key_of(number), make_kv(number))
        store.name("ns", [record(f"n{number}", number)], tenant="somebody")
    store.forget("ns", ["n4"])
    store._index.shorten_log()
    return store


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def cut(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(5000)


def remove(path: Path) -> None:
    path.unlink()


HARMS = pytest.mark.parametrize("harm", [zero, cut, remove])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    caplog.clear()
    return found


@HARMS
@pytest.mark.parametrize("opened", [True, False])
def test_index(
    tmp_path: Path, live: KVStore, harm: Callable[[Path], None], opened: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "store"
    if not opened:
        live.close()
    harm(folder / "index.sqlite")
    store = live if opened else open_store(folder, 0)
    try:
        assert store.names.ids("ns") == []
    except DamagedIndexError:
        assert opened
    assert store.names.lookup("ns", ["n1", "n4"]) == [None, None]
    assert ["a new one is created" in said for said in warnings(caplog)] == [True] * (opened or harm is not remove)
    assert store.holds([key_of(number) for number in range(5)]) == [True] * 4 + [False]
    store.name("ns", [record(f"n{number}", number) for number in range(4)], tenant="somebody")
    assert all(is_held(store, number) for number in range(4))
    assert (store.stats("somebody").entries, store.stats("somebody").nodes) == (4, 4)
    # And goes on as if nothing had been.
    store.put(key_of(7), make_kv(7))
    store.forget("ns", ["n1"])
    assert store.holds([key_of(7), key_of(1)]) == [True, False]
    store.close()
    assert check_store(folder).is_clean
    assert warnings(caplog) == []


@HARMS
def test_adding_again_computes_nothing(
    tmp_path: Path, make_engine: MakeEngine, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    with make_engine(store=tmp_path) as engine:
        assert engine.add(CHUNKS).encoded == 4
        assert engine.delete(["n3"]) == 1
        engine._store._index.shorten_log()
        harm(tmp_path / "index.sqlite")
        prompt = BlendPrompt("t1", CHUNKS[:3], "t2")
        assert len(engine.prefill(prompt).report.chunks) == 3
        assert len(warnings(caplog)) <= 1
        assert engine.add(CHUNKS[:3]).encoded == 0
        assert engine.prefill(BlendPrompt("t1", ["n0", "n1", "n2"], "t2")).report.hits == 3
        assert not engine.contains("n3")


def test_what_is_found_lives_as_long_as_whoever_adds_it_says(tmp_path: Path, live: KVStore) -> None:
    live.close()
    (tmp_path / "store" / "index.sqlite").unlink()
    now = 1e9
    store = open_store(tmp_path / "store", 0, clock=lambda: now)
    store.prolong([key_of(1)], 60)
    store.name("ns", [record("n1", 1)])
    now += 61
    assert store.holds([key_of(1), key_of(2)]) == [False, True]


def test_what_is_found_counts_against_the_budget(tmp_path: Path, live: KVStore) -> None:
    live.close()
    (tmp_path / "store" / "index.sqlite").unlink()
    size = files_of(tmp_path / "store")[0].stat().st_size
    store = open_store(tmp_path / "store", 0, disk_bytes=4 * size + size // 2)
    store.name("ns", [record("n1", 1)])
    store.put(key_of(9), make_kv(9))
    store.open(key_of(1))
    store.put(key_of(8), make_kv(8))
    assert store.stats().disk_bytes <= 4 * size + size // 2
    assert len(files_of(tmp_path / "store")) == store.stats().entries
    assert store.holds([key_of(8), key_of(9), key_of(1)]) == [True] * 3


@pytest.mark.parametrize("part", [".", "kv", "tmp"])
def test_a_folder_that_is_deleted(tmp_path: Path, live: KVStore, part: str, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(tmp_path / "store" / part)
    for number in range(5):
        assert live.open(key_of(number)) is None or part != "."
        live.put(key_of(number), make_kv(number))
    if part == ".":
        assert live.names.lookup("ns", ["n1"]) == [None]
    live.name("ns", [record(f"n{number}", number) for number in range(4)], tenant="somebody")
    assert len(files_of(tmp_path / "store")) == 5
    live.close()
    report = check_store(tmp_path / "store")
    assert (report.problems, report.entries, report.names) == ([], 5, 4)
    assert os.stat(tmp_path / "store").st_mode & 0o077 == 0
    words = {".": "is gone, so a new one is created", "kv": "is damaged and computed again", "tmp": ""}
    assert [words[part] in message for message in caplog.messages] == [True] * (part != "tmp")


def test_another_process_follows(tmp_path: Path, live: KVStore) -> None:
    """What one process begins anew, all others have open from then on."""
    folder = tmp_path / "store"
    other = open_store(folder, 10**6)
    assert is_held(other, 3)
    remove(folder / "index.sqlite")
    assert live.forget("ns", ["n3"]) == 0
    assert other.names.lookup("ns", ["n3"]) == [None]
    other.name("ns", [record("n3", 3)], tenant="somebody")
    assert is_held(live, 3)
    assert live.forget("ns", ["n3"]) == 1
    assert other.open(key_of(3)) is None
