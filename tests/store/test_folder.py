"""Folders that are something else, full, not to be written for a while or for good, or of many processes."""

import errno
import fcntl
import json
import logging
import os
import random
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.errors import ConfigError, StoreError, StoreFormatError, StoreFullError
from cacheblend_rag.store import KVStore, check_store
from tests.store import workers
from tests.store.kit import (
    add,
    fill,
    is_held,
    key_of,
    make_kv,
    open_store,
    put,
    read,
    record,
    remount,
    run,
    same,
    start,
    start_with_pipe,
    writing_elsewhere,
)
from tests.store.kit import small_disk as mounted_disk

NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Give a folder that other users can reach, as pytest's cannot be."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path, _, _ in os.walk(folder):
        os.chmod(path, 0o700)
    shutil.rmtree(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a disk of one megabyte."""
    with mounted_disk(tmp_path / "disk", 2**20) as disk:
        yield disk


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(p): (p.read_bytes() if p.is_file() else b"", p.stat().st_mtime_ns) for p in [folder, *folder.rglob("*")]
    }


@pytest.mark.parametrize("version", [1, 2, 4, "3", True, None])
def test_another_format_version(tmp_path: Path, version: object) -> None:
    store = open_store(tmp_path, 0)
    store.put(key_of(1), make_kv(1))
    store.close()
    mark = json.loads((tmp_path / "store.json").read_text())
    (tmp_path / "store.json").write_text(json.dumps({**mark, "version": version}))
    before = snapshot(tmp_path)
    for use in (
        lambda: open_store(tmp_path, 0),
        lambda: check_store(tmp_path),
        lambda: check_store(tmp_path, repair=True),
    ):
        with pytest.raises(
            StoreFormatError, match=f"version {version!r}, but this cacheblend-rag reads version 3; remove the folder"
        ):
            use()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("text", ["[]", '{"format": "something else", "version": 1}', '{"format": 1}'])
def test_the_mark_of_something_else(tmp_path: Path, text: str) -> None:
    open_store(tmp_path, 0).close()
    (tmp_path / "store.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    before = snapshot(tmp_path)
    with pytest.raises(StoreFormatError, match="is damaged or was not written by cacheblend-rag"):
        open_store(tmp_path, 0)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("text", ["", "{", "\ufeff\ud800", None])
def test_damaged_mark(tmp_path: Path, text: str | None) -> None:
    """A mark that is no mark is written again where everything else is a store's, and nowhere else."""
    store = open_store(tmp_path / "store", 0)
    store.put(key_of(1), make_kv(1))
    store.close()
    (tmp_path / "other").mkdir()
    for folder in (tmp_path / "store", tmp_path / "other"):
        (folder / "letter.txt").write_text("dear")
        (folder / "store.json").unlink(missing_ok=True)
        if text is not None:
            (folder / "store.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    store = open_store(tmp_path / "store", 0)
    assert store.holds([key_of(1)]) == [True]
    store.close()
    assert json.loads((tmp_path / "store" / "store.json").read_text())["version"] == 3
    before = snapshot(tmp_path / "other")
    with pytest.raises(StoreError):
        open_store(tmp_path / "other", 0)
    assert snapshot(tmp_path / "other") == before


def test_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    before = snapshot(tmp_path)
    with pytest.raises(StoreError, match=r"is not a store and holds other files \(letter.txt\)"):
        open_store(tmp_path, 0)
    for path in (tmp_path / "letter.txt", tmp_path / "letter.txt" / "store"):
        with pytest.raises(StoreError, match="needs a folder"):
            open_store(path, 0)
    with pytest.raises(StoreError, match="there is no folder"):
        check_store(tmp_path / "new")
    assert snapshot(tmp_path) == before
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="is empty"):
        check_store(tmp_path / "empty")


def test_a_store_half_made(tmp_path: Path) -> None:
    (tmp_path / "store.lock").touch()
    (tmp_path / "store.json.tmp").write_text('{"for')
    store = open_store(tmp_path, 0)
    store.put(key_of(1), make_kv(1))
    store.close()
    shutil.rmtree(tmp_path / "tmp")
    store = open_store(tmp_path, 0)
    assert store.holds([key_of(1)]) == [True]
    store.close()
    assert check_store(tmp_path).is_clean


def test_full_at_the_start(small_disk: Path) -> None:
    ballast = fill(small_disk)
    with pytest.raises(StoreFullError):
        open_store(small_disk / "s", 0, 10**9)
    ballast.unlink()
    open_store(small_disk / "s", 0, 10**9).close()
    assert check_store(small_disk / "s").is_clean


@pytest.mark.parametrize("log_left", [False, True])
def test_folder_of_somebody_else(open_folder: Path, log_left: bool) -> None:
    store = open_store(open_folder / "live", 0)
    add(store, 1)
    if log_left:
        # As a killed process leaves it: what was written last is in SQLite's log alone.
        shutil.copytree(open_folder / "live", open_folder / "s")
        assert (open_folder / "s" / "index.sqlite-wal").stat().st_size > 0
        store.close()
    else:
        store.close()
        shutil.copytree(open_folder / "live", open_folder / "s")
    (open_folder / "s" / "empty").mkdir()
    user = NOBODY if os.getuid() == 0 else None
    for path in [*(open_folder / "s").rglob("*"), open_folder / "s"]:
        if user is not None:
            os.chown(path, user, user)
        path.chmod(0o500 if path.is_dir() else 0o400)
    run(workers.use_read_only, open_folder / "s", user)


@pytest.mark.parametrize("closed", [True, False])
def test_read_only_disk(small_disk: Path, closed: bool) -> None:
    store = open_store(small_disk / "live", 0)
    add(store, 1)
    if closed:
        store.close()
    shutil.copytree(small_disk / "live", small_disk / "s")
    store.close()
    (small_disk / "s" / "empty").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    run(workers.use_read_only, small_disk / "s", None)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)


@pytest.mark.parametrize("is_open", [False, True], ids=["others come later", "others are there"])
def test_who_can_only_read_sees_what_others_write(small_disk: Path, tmp_path: Path, is_open: bool) -> None:
    folder, view = small_disk / "s", tmp_path / "view"
    run(workers.write_some, folder, [1, 2], [])
    view.mkdir()
    subprocess.run(["mount", "--bind", str(small_disk), str(view)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(view)], check=True)
        if is_open:
            _, writer = start_with_pipe(workers.hold_open, folder)
            assert writer.recv() == "open"
        store = open_store(view / "s", 10**6)
        assert store.names.ids("ns") == ["n1", "n2"]
        assert is_held(store, 1)
        run(workers.write_some, folder, [3], ["n1"])
        assert store.names.ids("ns") == ["n2", "n3"]
        # It is in RAM here, too.
        assert store.open(key_of(1)) is None
        if is_open:
            writer.send("end")
        store.close()
    finally:
        subprocess.run(["umount", "-l", str(view)], check=True)


def test_damaged_index_never_gives_wrong_kv(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s", 0)
    add(store, *range(4))
    store.close()
    index = tmp_path / "s" / "index.sqlite"
    data = index.read_bytes()
    used = [at for at, byte in enumerate(data) if byte]
    chance = random.Random(0)
    for _ in range(60):
        at = chance.choice(used)
        index.write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
        store = None
        with suppress(StoreError):
            store = open_store(tmp_path / "s", 0)
        for number in range(4 if store else 0):
            with suppress(StoreError):
                reader = store.open(key_of(number))
                assert reader is None or same(read(reader), make_kv(number))
            with suppress(StoreError):
                put(store, number)
                assert is_held(store, number)
        if store:
            store.close()


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_what_cannot_be_read_for_a_moment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store = open_store(tmp_path, 0)
    add(store, 1)
    own = getattr(os, call)

    def fail(*arguments: Any, **named: Any) -> Any:
        if call == "preadv" or ".safetensors" in str(arguments[0]):
            raise OSError(errno.EMFILE, "Too many open files")
        return own(*arguments, **named)

    with monkeypatch.context() as broken:
        broken.setattr(os, call, fail)
        assert store.open(key_of(1)) is None
    assert is_held(store, 1)


def test_who_can_only_read_does_not_overlook_a_log(small_disk: Path) -> None:
    store = open_store(small_disk / "live", 0)
    store.name("ns", [record("n1", 1)])
    store.forget("ns", ["n1"])
    shutil.copytree(small_disk / "live", small_disk / "s")
    store.close()
    # As some copies leave it out.
    (small_disk / "s" / "index.sqlite-shm").unlink()
    assert (small_disk / "s" / "index.sqlite-wal").stat().st_size
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match=r"cannot be read without merging index\.sqlite-wal"):
        open_store(small_disk / "s", 0).names.ids("ns")


@pytest.mark.parametrize("version", [0, 4, 6])
def test_another_index(tmp_path: Path, version: int) -> None:
    folder = tmp_path
    store = open_store(folder, 0)
    add(store, 1)
    store.close()
    connection = sqlite3.connect(folder / "index.sqlite")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    data = (folder / "index.sqlite").read_bytes()
    said = f"format version {version}, but this cacheblend-rag reads version 9; remove the (store )?folder and warm it again"
    with pytest.raises(StoreFormatError, match=said):
        open_store(folder, 0)
    with pytest.raises(StoreFormatError, match=said):
        check_store(folder, repair=True)
    assert (folder / "index.sqlite").read_bytes() == data


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
    assert "in the memory of this process only" in caplog.text
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
    with mounted_disk(tmp_path / "disk", 2**20) as disk, caplog.at_level(logging.WARNING):
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
        assert len(caplog.messages) == 1 and "in the memory of this process only" in caplog.text


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


def test_more_deletions_than_are_remembered(tmp_path: Path) -> None:
    store, other = open_store(tmp_path, 10**6), open_store(tmp_path, 0)
    put(store, *range(8))
    assert store.open(key_of(7)) is not None
    for number in range(6):
        other.discard(key_of(number))
    with closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as index:
        index.execute("DELETE FROM deletions WHERE seq <= (SELECT max(seq) FROM deletions) - 2")
    assert store.stats().ram_bytes == make_kv(6).nbytes + make_kv(7).nbytes


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
