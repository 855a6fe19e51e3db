"""An index that is damaged, or was removed while in use, is refused; questions are answered all the same."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheblend_rag import BlendPrompt, Chunk
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import KVStore, check_store
from cacheblend_rag.store.database import DamagedIndexError
from tests.engines import MakeEngine
from tests.families import words
from tests.store.kit import files_of, key_of, make_kv, open_store, record

CHUNKS = [Chunk(words(20, number), f"n{number}", document="dddx"[number], start=100 * number) for number in range(4)]


@pytest.fixture
def live(tmp_path: Path) -> KVStore:
    store = open_store(tmp_path / "store", 10**6)
    for number in range(5):
        store.put(key_of(number), make_kv(number))
        store.name("ns", [record(f"n{number}", number)])
    store._index.shorten_log()
    return store


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def cut(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(5000)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [zero, cut])
def test_a_damaged_index_is_refused_and_left_as_it_is(
    tmp_path: Path, live: KVStore, harm: Callable[[Path], None]
) -> None:
    live.close()
    index = tmp_path / "store" / "index.sqlite"
    harm(index)
    data = index.read_bytes()
    with pytest.raises(DamagedIndexError, match="remove the store folder"):
        open_store(tmp_path / "store", 0).names.ids("ns")
    with pytest.raises(DamagedIndexError):
        check_store(tmp_path / "store", repair=True)
    assert index.read_bytes() == data
    assert len(files_of(tmp_path / "store")) == 5


@pytest.mark.parametrize("harm", [zero, cut, remove])
def test_questions_are_answered_without_it(
    tmp_path: Path, make_engine: MakeEngine, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    prompt = BlendPrompt("t1", CHUNKS[:3], "t2")
    engine = make_engine(store=tmp_path, ram_bytes=0)
    engine.add(CHUNKS)
    engine._store._index.shorten_log()
    harm(tmp_path / "index.sqlite")
    found = engine.prefill(prompt)
    assert (found.report.hits, found.report.misses) == (0, 3)
    assert caplog.text.count("the store cannot be used now") == 1
    with pytest.raises(StoreError):
        engine.add([Chunk(words(9, 9), "new")])


@pytest.mark.parametrize("part", ["kv", "tmp"])
def test_a_part_of_the_folder_that_is_deleted(tmp_path: Path, live: KVStore, part: str) -> None:
    shutil.rmtree(tmp_path / "store" / part)
    for number in range(5):
        live.put(key_of(number), make_kv(number))
    assert len(files_of(tmp_path / "store")) == 5
    live.close()
    report = check_store(tmp_path / "store")
    assert (report.problems, report.entries, report.names) == ([], 5, 5)
    assert os.stat(tmp_path / "store").st_mode & 0o077 == 0
