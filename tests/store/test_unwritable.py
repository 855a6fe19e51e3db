"""Folders that cannot be written for a while: locked, read-only, full."""

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.store import KVStore
from tests.store.kit import (
    add,
    files_of,
    fill,
    key_of,
    make_kv,
    open_store,
    read,
    record,
    remount,
    same,
    small_disk,
    writing_elsewhere,
)


def miss(store: KVStore, number: int, ttl_s: float | None = None) -> None:
    """Keep the KV of a miss, as an answer does."""
    assert store.put_later(key_of(number), make_kv(number), "ns", [record(f"n{number}", number)], ttl_s=ttl_s)


def is_hit(store: KVStore, number: int) -> bool:
    reader = store.open(key_of(number))
    return reader is not None and same(read(reader), make_kv(number))


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < limit_s


def eventually_written(folder: Path, count: int) -> None:
    until = time.monotonic() + 20
    while len(files_of(folder)) < count:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("write_back_bytes", [0, 10**6])
def test_another_process_writes(tmp_path: Path, write_back_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    with closing(open_store(tmp_path, 10**6)) as store:
        add(store, 1)
    with ExitStack() as elsewhere, caplog.at_level(logging.WARNING):
        elsewhere.enter_context(writing_elsewhere(tmp_path))
        # Made stores are opened without writing.
        with within(1.0):
            store = open_store(tmp_path, 10**6, write_back_bytes=write_back_bytes, lock_timeout_s=0.4)
        with within(0.4):
            for number in (2, 3, 4):
                miss(store, number)
            assert store.names.lookup("ns", ["n1", "n4"]) == [record("n1", 1), record("n4", 4)]
            assert all(is_hit(store, number) for number in (1, 2, 3, 4))
        with within(1.2), pytest.raises(StoreError, match=r"index.sqlite is locked: another"):
            store.put(key_of(5), make_kv(5))
        with within(1.2), pytest.raises(StoreError, match="locked"):
            store.flush()
        # What is damaged is not met again, even if its entry cannot be dropped now.
        with pytest.raises(StoreError):
            store.discard(key_of(1), wait=False)
        assert not is_hit(store, 1) and store.holds([key_of(1)]) == [False]
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "kept in memory" in caplog.text
    # Whatever comes next brings the others along.
    time.sleep(2.1)
    miss(store, 1)
    eventually_written(tmp_path, 4)
    store.flush()
    assert store.stats().waiting == 0
    store.close()
    with closing(open_store(tmp_path, 0)) as store:
        assert all(is_hit(store, number) for number in (1, 2, 3, 4))
        assert store.names.ids("ns") == ["n1", "n2", "n3", "n4"]


def test_closing_waits_once_and_says_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_store(tmp_path, 0).close()
    with writing_elsewhere(tmp_path):
        store = open_store(tmp_path, 10**6, write_back_bytes=10**6, lock_timeout_s=0.4)
        for number in range(8):
            miss(store, number)
        with within(2.0):
            store.close()
    assert "the KV of 8 misses was not stored and is lost: index" in caplog.messages[-1]


def test_another_process_is_stuck_opening_it(tmp_path: Path) -> None:
    open_store(tmp_path, 0).close()
    with open(tmp_path / "store.lock", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with within(1.0), pytest.raises(StoreError, match="another process has been opening"):
            open_store(tmp_path, 0, lock_timeout_s=0.2)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "60", None])
def test_no_number_of_seconds(tmp_path: Path, seconds: object) -> None:
    with pytest.raises(ConfigError, match="lock_timeout_s"):
        open_store(tmp_path, 0, lock_timeout_s=seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize("write_back_bytes", [0, 10**6])
def test_a_disk_that_is_read_only(tmp_path: Path, write_back_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    wall = [1000.0]
    with small_disk(tmp_path / "disk", 2**20) as disk, caplog.at_level(logging.WARNING):
        folder = disk / "store"
        store = open_store(folder, 10**6, write_back_bytes=write_back_bytes, clock=lambda: wall[0])
        add(store, 1)
        store.close()
        remount(disk, "ro")
        store = open_store(folder, 10**6, write_back_bytes=write_back_bytes, clock=lambda: wall[0])
        for number in (2, 3):
            miss(store, number)
        miss(store, 4, ttl_s=50)
        store.settle()
        assert all(is_hit(store, number) for number in (1, 2, 3, 4))
        assert store.names.lookup("ns", ["n2"]) == [record("n2", 2)]
        assert store.stats().waiting == 3
        wall[0] += 100
        assert (is_hit(store, 4), is_hit(store, 3)) == (False, True)
        assert len(caplog.messages) == 1 and caplog.messages[0].endswith("in memory, for this process alone")
        store.flush()
        store.close()
        assert len(caplog.messages) == 1


def test_a_disk_that_is_full_of_what_is_pinned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", 2**20) as disk, caplog.at_level(logging.WARNING):
        store = open_store(disk / "store", 10**6, 10**9, write_back_bytes=10**6)
        add(store, 1)
        store.pin("ns", ["n1"])
        ballast = fill(disk)
        for number in range(2, 40):
            miss(store, number)
            store.settle()
            fill(disk)
        waiting = store.stats().waiting
        assert waiting > 0
        assert all(is_hit(store, number) for number in (1, 38, 39))
        ballast.unlink()
        store.flush()
        assert store.stats().waiting == 0
        store.close()


def test_what_stays_goes_for_room_oldest_first(tmp_path: Path) -> None:
    open_store(tmp_path, 0).close()
    nbytes = make_kv(1).nbytes
    with writing_elsewhere(tmp_path):
        store = open_store(tmp_path, 0, write_back_bytes=3 * nbytes, lock_timeout_s=0.0)
        for number in range(1, 7):
            miss(store, number)
            store.settle()
        assert [is_hit(store, number) for number in range(1, 7)] == [False] * 3 + [True] * 3
        assert store.names.ids("ns") == ["n4", "n5", "n6"]
        # What is deleted meanwhile is never written.
        store._waiting.forget("ns", ["n5"])
        assert store.stats().waiting == 2
    store.close()
    assert len(files_of(tmp_path)) == 2
