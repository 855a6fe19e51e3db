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
    fill,
    is_held,
    key_of,
    make_kv,
    open_store,
    record,
    remount,
    small_disk,
    writing_elsewhere,
)


def miss(store: KVStore, number: int, ttl_s: float | None = None) -> None:
    """Keep the KV of a miss, as an answer does."""
    assert store.put_later(key_of(number), make_kv(number), "ns", [record(f"n{number}", number)], ttl_s=ttl_s)


@contextmanager
def within(limit_s: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < limit_s


@pytest.mark.parametrize("write_back_bytes", [0, 10**6])
def test_another_process_writes(tmp_path: Path, write_back_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    with closing(open_store(tmp_path, 10**6)) as store:
        add(store, 1)
    with ExitStack() as elsewhere, caplog.at_level(logging.WARNING):
        elsewhere.enter_context(writing_elsewhere(tmp_path))
        # Made stores are opened without writing.
        with within(1.0):
            store = open_store(tmp_path, 10**6, write_back_bytes=write_back_bytes, lock_timeout_s=0.4)
        # The first waits a moment, and no other does.
        with within(1.0):
            for number in (2, 3, 4):
                miss(store, number)
            assert store.names.lookup("ns", ["n1", "n4"]) == [record("n1", 1), None]
            assert all(is_held(store, number) for number in (1, 2, 3, 4))
        with within(1.2), pytest.raises(StoreError, match=r"index.sqlite is locked: another"):
            store.put(key_of(5), make_kv(5))
        with pytest.raises(StoreError, match="locked"):
            store.flush()
        # What is damaged is not met again, even if its entry cannot be dropped now.
        with pytest.raises(StoreError):
            store.discard(key_of(1), wait=False)
        assert not is_held(store, 1) and store.holds([key_of(1)]) == [False]
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "in memory by this process alone" in caplog.text
    # What prompts bring next is written again; what is in RAM alone goes with its name.
    miss(store, 6)
    store.flush()
    assert store.holds([key_of(number) for number in (2, 6)]) == [False, True]
    assert store.forget("ns", ["n2", "n6"]) == 1
    assert [is_held(store, number) for number in (2, 3, 6)] == [False, True, False]


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
        assert all(is_held(store, number) for number in (1, 2, 3, 4))
        wall[0] += 100
        assert (is_held(store, 4), is_held(store, 3)) == (False, True)
        store.flush()
        store.close()
        assert len(caplog.messages) == 1 and "in memory by this process alone" in caplog.text


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
        assert all(is_held(store, number) for number in (1, 38, 39))
        assert caplog.text.count("of a miss was not stored") == 1
        with pytest.raises(StoreError, match="no space left"):
            store.flush()
        ballast.unlink()
        miss(store, 40)
        store.flush()
        assert store.holds([key_of(40)]) == [True]
