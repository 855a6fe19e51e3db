"""Folders that are something else, damaged, locked, or not to be written."""

import fcntl
import json
import os
import resource
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendPrompt, Chunk
from cacheblend_rag.errors import ConfigError, StoreError, StoreFormatError, StoreReadOnlyError
from cacheblend_rag.store import check_store
from tests.engines import MakeEngine
from tests.families import words
from tests.store.kit import (
    add,
    is_held,
    key_of,
    open_store,
    put,
    put_miss,
    record,
    remount,
    writing_elsewhere,
)
from tests.store.kit import small_disk as mounted_disk


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give the folder of a store that is closed."""
    store = open_store(tmp_path / "s", 0)
    add(store, *range(4))
    store.close()
    return tmp_path / "s"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a disk of one megabyte."""
    with mounted_disk(tmp_path / "disk", 2**20) as disk:
        yield disk


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refuses(folder: Path, error: type[StoreError] = StoreError) -> None:
    """See that a folder is refused by all that would open it, and left as it is."""
    before = snapshot(folder)
    for use in (
        lambda: open_store(folder, 0).names.ids("ns"),
        lambda: check_store(folder),
        lambda: check_store(folder, repair=True),
    ):
        with pytest.raises(error):
            use()
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    "mark",
    [{"version": 2}, {"version": 4}, {"version": "3"}, {"version": True}, {"version": None}, {"format": "x"}, []],
)
def test_another_format(folder: Path, mark: Any) -> None:
    own = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text(json.dumps(own | mark if mark else mark))
    refuses(folder, StoreFormatError)


def set_version(index: Path, version: int) -> None:
    with closing(sqlite3.connect(index)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (lambda index: set_version(index, 4), StoreFormatError),
        (lambda index: set_version(index, 99), StoreFormatError),
        (lambda index: index.write_bytes(bytes(index.stat().st_size)), StoreError),
        (lambda index: os.truncate(index, 3000), StoreError),
        (lambda index: index.write_bytes(b"hello" * 3000), StoreError),
    ],
    ids=["older", "newer", "zeros", "cut", "text"],
)
def test_another_or_a_damaged_index(folder: Path, harm: Callable[[Path], None], error: type[StoreError]) -> None:
    harm(folder / "index.sqlite")
    refuses(folder, error)


def test_a_check_finds_a_page_of_the_index_that_is_lost(folder: Path) -> None:
    with open(folder / "index.sqlite", "r+b") as index:
        index.seek(3 * 4096)
        index.write(bytes(4096))
    with pytest.raises(StoreError):
        check_store(folder, repair=True)


def test_an_error_of_the_disk_is_not_called_damage(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(store=tmp_path)
    engine.add([Chunk(words(20, 0), "n0")])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(StoreError, match="disk I/O error; see to its disk"):
            engine.add([Chunk(words(20, 1), "n1")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert engine.add([Chunk(words(20, 1), "n1")]).encoded == 1


@pytest.mark.parametrize("harm", [lambda index: os.truncate(index, 5000), Path.unlink], ids=["cut", "removed"])
def test_questions_are_answered_where_the_index_is_lost_in_use(
    tmp_path: Path, make_engine: MakeEngine, harm: Callable[[Path], None]
) -> None:
    chunks = [Chunk(words(20, number), f"n{number}") for number in range(3)]
    engine = make_engine(store=tmp_path, ram_bytes=0)
    engine.add(chunks)
    # Another process brings what is in its log into the index.
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    harm(tmp_path / "index.sqlite")
    found = engine.prefill(BlendPrompt("t1", chunks, "t2"))
    assert (found.report.hits, found.report.misses) == (0, 3)
    with pytest.raises(StoreError):
        engine.add([Chunk(words(9, 9), "new")])


@pytest.mark.parametrize("text", ["", "{", "\ufeff\ud800", None])
def test_a_damaged_mark(folder: Path, text: str | None) -> None:
    (folder / "store.json").unlink()
    if text is not None:
        (folder / "store.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    refuses(folder, StoreFormatError)


def test_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    refuses(tmp_path)
    for path in (tmp_path / "letter.txt", tmp_path / "letter.txt" / "store"):
        with pytest.raises(StoreError):
            open_store(path, 0)
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        with pytest.raises(StoreError):
            check_store(tmp_path / name)
    assert not (tmp_path / "new").exists() and not list((tmp_path / "empty").iterdir())


def test_a_store_half_made(tmp_path: Path) -> None:
    (tmp_path / "store.lock").touch()
    (tmp_path / ".store.json.0").write_text('{"for')
    with closing(open_store(tmp_path, 0)) as store:
        put(store, 1)
    assert check_store(tmp_path).is_clean


def test_a_disk_that_is_read_only(small_disk: Path) -> None:
    with closing(open_store(small_disk / "s", 0)) as store:
        add(store, 1)
    remount(small_disk, "ro")
    for use in (
        lambda: open_store(small_disk / "s", 0),
        lambda: open_store(small_disk / "new", 0),
        lambda: check_store(small_disk / "s"),
    ):
        with pytest.raises(StoreReadOnlyError):
            use()
    remount(small_disk, "rw")


def test_what_cannot_be_read_for_a_moment_stays(folder: Path) -> None:
    store = open_store(folder, 0)
    assert is_held(store, 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # No other file can be opened.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert store.open(key_of(1)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert is_held(store, 1)


def test_another_process_writes(folder: Path) -> None:
    with writing_elsewhere(folder):
        # Made stores are opened without writing, and misses are kept in RAM.
        store = open_store(folder, 10**6, lock_timeout_s=0.4)
        for number in (4, 5):
            put_miss(store, number)
        assert store.names.lookup("ns", ["n1", "n5"]) == [record("n1", 1), None]
        assert all(is_held(store, number) for number in (1, 4, 5))
        with pytest.raises(StoreError):
            put(store, 6)
        with pytest.raises(StoreError):
            store.flush()
        # What is damaged is not met again, even if its entry cannot be dropped now.
        with pytest.raises(StoreError):
            store.discard(key_of(1), wait=False)
        assert not is_held(store, 1) and store.holds([key_of(1)]) == [False]
    # What prompts bring next is written again; what is in RAM alone goes with its name.
    put_miss(store, 7)
    store.flush()
    assert store.holds([key_of(number) for number in (4, 7)], durable=True) == [False, True]
    assert store.forget("ns", ["n4", "n7"]) == 1
    assert [is_held(store, number) for number in (4, 5, 7)] == [False, True, False]


def test_another_process_is_stuck_opening_it(folder: Path) -> None:
    with open(folder / "store.lock", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreError):
            open_store(folder, 0, lock_timeout_s=0.2)
    for seconds in (-1, float("nan"), "60", None):
        with pytest.raises(ConfigError):
            open_store(folder, 0, lock_timeout_s=seconds)  # type: ignore[arg-type]
