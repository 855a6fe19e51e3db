"""An index that is damaged, lost or behind is restored by itself; what was deleted stays so."""

import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheblend_rag.store import KVStore, NodeRecord, check_store
from tests.store.kit import files_of, key_of, make_kv, open_store, read, record, same

NUMBERS = range(5)


@pytest.fixture
def live(tmp_path: Path) -> KVStore:
    store = open_store(tmp_path / "store", 10**6)
    for number in NUMBERS:
        store.put(key_of(number), make_kv(number))
        store.name("ns", [record(f"n{number}", number)], tenant="somebody")
    store.forget("ns", ["n4"])
    return store


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def cut(path: Path) -> None:
    with open(path, "r+b") as file:
        file.truncate(5000)


def remove(path: Path) -> None:
    path.unlink()


def written(store: KVStore) -> None:
    """Have the log in the index itself, so that there is something to damage."""
    store._index.database.tidy()


def is_whole(store: KVStore, numbers: range = range(4)) -> bool:
    names = store.names.lookup("ns", [f"n{number}" for number in numbers])
    if names != [record(f"n{number}", number) for number in numbers]:
        return False
    for number in numbers:
        reader = store.open(key_of(number))
        if reader is None or not same(read(reader), make_kv(number)):
            return False
    return store.names.lookup("ns", ["n4"]) == [None] and store.holds([key_of(4)]) == [False]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    caplog.clear()
    return found


@pytest.mark.parametrize("harm", [zero, cut, remove])
@pytest.mark.parametrize("opened", [True, False])
def test_index(
    tmp_path: Path, live: KVStore, harm: Callable[[Path], None], opened: bool, caplog: pytest.LogCaptureFixture
) -> None:
    written(live)
    store = live
    if not opened:
        live.close()
    harm(tmp_path / "store" / "index.sqlite")
    if not opened:
        store = open_store(tmp_path / "store", 0)
    # What a process has read lately it need not read again; to write it must.
    store.name("ns", [record("n1", 1)], tenant="somebody")
    assert is_whole(store)
    [said] = warnings(caplog)
    assert "4 names and 4 entries of KV were restored from its mirror" in said
    assert (store.stats("somebody").entries, store.stats("somebody").nodes) == (4, 4)
    # And goes on as if nothing had been.
    store.put(key_of(7), make_kv(7))
    store.forget("ns", ["n1"])
    assert store.holds([key_of(7), key_of(1)]) == [True, False]
    store.close()
    assert check_store(tmp_path / "store").is_clean
    assert warnings(caplog) == []


@pytest.mark.parametrize("harm", [zero, cut, remove])
@pytest.mark.parametrize("opened", [True, False])
def test_mirror(
    tmp_path: Path, live: KVStore, harm: Callable[[Path], None], opened: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = live
    if not opened:
        live.close()
    harm(tmp_path / "store" / "mirror.sqlite")
    if not opened:
        store = open_store(tmp_path / "store", 0)
    store.name("ns", [record("n1", 1)], tenant="somebody")
    assert is_whole(store)
    assert warnings(caplog) == []
    (tmp_path / "store" / "index.sqlite").unlink()
    assert is_whole(store)
    store.close()
    assert check_store(tmp_path / "store").is_clean


def test_an_index_that_is_put_back(tmp_path: Path, live: KVStore) -> None:
    """An older copy, or one that lost its log, does not bring back what was deleted."""
    folder = tmp_path / "store"
    live.name("ns", [record("n4", 4)], tenant="somebody")
    live.put(key_of(4), make_kv(4))
    live.close()
    shutil.copy(folder / "index.sqlite", tmp_path / "old")
    store = open_store(folder, 0)
    store.forget("ns", ["n4"])
    copy = Path(shutil.copytree(folder, tmp_path / "killed"))
    store.close()
    shutil.copy(tmp_path / "old", folder / "index.sqlite")
    (copy / "index.sqlite-wal").unlink()
    for each in (folder, copy):
        store = open_store(each, 0)
        assert is_whole(store)
        store.close()
        assert check_store(each).is_clean


def test_both(tmp_path: Path, live: KVStore, caplog: pytest.LogCaptureFixture) -> None:
    """Without a mirror KV is found by its files, and names when they are added."""
    folder = tmp_path / "store"
    live.close()
    caplog.clear()
    for name in ("index.sqlite", "mirror.sqlite"):
        zero(folder / name)
    store = open_store(folder, 0)
    until = time.monotonic() + 10
    while store.holds([key_of(n) for n in range(4)]) != [True] * 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert store.names.ids("ns") == []
    store.name("ns", [record(f"n{number}", number) for number in range(4)], tenant="somebody")
    assert is_whole(store)
    assert "KV is sought in the files" in warnings(caplog)[0]
    store.close()
    assert check_store(folder).is_clean


@pytest.mark.parametrize("revision", ["known", "damaged"])
def test_an_old_mirror_and_no_index(tmp_path: Path, live: KVStore, revision: str) -> None:
    """A deleted name would come back by it."""
    folder = tmp_path / "store"
    old = (folder / "mirror.sqlite").read_bytes()
    live.forget("ns", ["n3"])
    live.close()
    (folder / "index.sqlite").unlink()
    (folder / "mirror.sqlite").write_bytes(old)
    if revision == "damaged":
        zero(folder / "revision")
    store = open_store(folder, 0)
    until = time.monotonic() + 10
    while store.holds([key_of(n) for n in range(3)]) != [True] * 3 and time.monotonic() < until:
        time.sleep(0.01)
    # Without it nothing says that there was a later one.
    assert store.names.ids("ns") == ([] if revision == "known" else ["n0", "n1", "n2", "n3"])
    store.name("ns", [record(f"n{number}", number) for number in range(3)], tenant="somebody")
    assert [store.open(key_of(number)) is not None for number in range(4)] == [True] * 3 + [False]
    store.close()
    assert check_store(folder).is_clean


def test_each_has_lost_other_names(tmp_path: Path) -> None:
    """What is left in either comes together."""
    store = open_store(tmp_path, 0)
    for begin in range(0, 900, 100):
        store.name(
            "ns", [NodeRecord(f"n{n:04}", key_of(n % 256), f"hash{n}", (n, n)) for n in range(begin, begin + 100)]
        )
    written(store)
    store.close()
    for name, at in (("index.sqlite", 0.5), ("mirror.sqlite", 0.6)):
        data = bytearray((tmp_path / name).read_bytes())
        page = int(len(data) * at) // 4096 * 4096
        data[page : page + 4096] = bytes(4096)
        (tmp_path / name).write_bytes(data)
    assert check_store(tmp_path, repair=True).repaired
    report = check_store(tmp_path)
    assert report.is_clean
    assert report.names > 800


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("nodes", "token_ids = x'0100'"),
        ("nodes", "id = id || 'x'"),
        ("nodes", "key = 'abc'"),
        ("entries", "digest = x'00'"),
        ("entries", "key = key || '0'"),
        ("entries", "file = 'x'"),
        ("entries", "expires_at = 5"),
    ],
)
def test_rows_that_are_others(
    tmp_path: Path, live: KVStore, table: str, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite sees nothing wrong with a flipped bit in a value; the record's checksum does, or the mirror."""
    live.close()
    connection = sqlite3.connect(tmp_path / "store" / "index.sqlite")
    for trigger, of in connection.execute("SELECT name, tbl_name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        if of == table:
            # As if nobody had written.
            connection.execute(f"DROP TRIGGER {trigger}")
    connection.execute(f"UPDATE {table} SET {change}")
    connection.commit()
    connection.close()
    caplog.clear()
    assert not check_store(tmp_path / "store").is_clean
    store = open_store(tmp_path / "store", 0)
    assert is_whole(store)
    assert len(warnings(caplog)) == 1
    store.close()
    assert check_store(tmp_path / "store").is_clean


@pytest.mark.parametrize("part", [".", "kv", "tmp"])
def test_a_folder_that_is_deleted(tmp_path: Path, live: KVStore, part: str, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(tmp_path / "store" / part)
    for number in NUMBERS:
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
    words = {".": "is begun anew", "kv": "is damaged, and computed again", "tmp": ""}
    assert [words[part] in message for message in caplog.messages] == [True] * (part != "tmp")


def test_another_process_follows(tmp_path: Path, live: KVStore) -> None:
    """What one process restores, all others have open from then on."""
    folder = tmp_path / "store"
    other = open_store(folder, 0)
    assert is_whole(other)
    (folder / "index.sqlite").unlink()
    live.forget("ns", ["n3"])
    assert other.names.lookup("ns", ["n3"]) == [None]
    other.name("ns", [record("n3", 3)], tenant="somebody")
    other.put(key_of(3), make_kv(3))
    assert is_whole(live)
    other.close()
    live.put(key_of(8), make_kv(8))
    again = open_store(folder, 0)
    assert again.holds([key_of(8), key_of(3)]) == [True, True]
