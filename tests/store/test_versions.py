"""Folders of format version 1 are brought up to date, or read as they are."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path

import pytest

from cacheblend_rag.errors import StoreFormatError
from cacheblend_rag.store import check_store, open_store
from tests.store import workers
from tests.store.kit import files_of, key_of, make_kv, read, record, run, same, start

# The tables as version 1 made them.
VERSION_1 = """
CREATE TABLE entries (
    key TEXT PRIMARY KEY, file TEXT NOT NULL, bytes INTEGER NOT NULL, digest BLOB NOT NULL, last_used INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX entries_by_use ON entries (last_used);
CREATE TABLE pending (file TEXT PRIMARY KEY, writer TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE deletions (seq INTEGER PRIMARY KEY, key TEXT NOT NULL);
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO counters VALUES ('entry_bytes', 0), ('clock', 0), ('revision', 0);
CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN
    UPDATE counters SET value = value + new.bytes WHERE name = 'entry_bytes';
END;
CREATE TRIGGER entry_deleted AFTER DELETE ON entries BEGIN
    UPDATE counters SET value = value - old.bytes WHERE name = 'entry_bytes';
    INSERT INTO deletions (key) VALUES (old.key);
END;
CREATE TABLE nodes (
    seq INTEGER PRIMARY KEY, namespace TEXT NOT NULL, id TEXT NOT NULL, key TEXT NOT NULL, text_hash TEXT NOT NULL,
    token_ids BLOB NOT NULL, checksum INTEGER NOT NULL, UNIQUE (namespace, id)
);
CREATE INDEX nodes_by_key ON nodes (key);
CREATE TRIGGER node_added AFTER INSERT ON nodes BEGIN
    UPDATE counters SET value = value + 1 WHERE name = 'revision';
END;
CREATE TRIGGER node_changed AFTER UPDATE ON nodes BEGIN
    UPDATE counters SET value = value + 1 WHERE name = 'revision';
END;
CREATE TRIGGER node_removed AFTER DELETE ON nodes BEGIN
    UPDATE counters SET value = value + 1 WHERE name = 'revision';
END;
"""


def as_version_1(folder: Path, more_entries: int = 0) -> None:
    """Write the folder of a closed store the way version 1 did."""
    connection = sqlite3.connect(folder / "index.sqlite")
    entries = connection.execute("SELECT key, file, bytes, digest, last_used FROM entries").fetchall()
    nodes = connection.execute("SELECT seq, namespace, id, key, text_hash, token_ids, checksum FROM nodes").fetchall()
    connection.close()
    (folder / "index.sqlite").unlink()
    connection = sqlite3.connect(folder / "index.sqlite")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.executescript(VERSION_1)
    entries += [(f"ff{n:030x}", f"ff{n:030x}.{n:016x}.safetensors", 0, b"", n) for n in range(more_entries)]
    connection.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", entries)
    connection.executemany("INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?, ?)", nodes)
    connection.commit()
    connection.close()
    (folder / "store.json").write_text(json.dumps({"format": "cacheblend-rag store", "version": 1}))


def mark(folder: Path) -> int:
    return int(json.loads((folder / "store.json").read_text())["version"])


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = tmp_path / "s"
    store = open_store(folder, 0)
    for number in range(1, 5):
        store.put(key_of(number), make_kv(number))
    store.name("ns", [record(f"n{number}", number) for number in (1, 3)])
    store.close()
    as_version_1(folder)
    return folder


def assert_whole(folder: Path) -> None:
    store = open_store(folder, 0, clock=None)
    for number in range(1, 5):
        reader = store.open(key_of(number))
        assert reader is not None
        assert same(read(reader), make_kv(number))
    assert store.lookup("ns", ["n1", "n2", "n3"]) == [record("n1", 1), None, record("n3", 3)]
    stats = store.stats()
    assert (stats.nodes, stats.disk_bytes) == (2, sum(path.stat().st_size for path in files_of(folder)))
    assert store.tenants() == [""]
    store.close()


def test_brought_up_to_date(old: Path) -> None:
    assert_whole(old)
    assert mark(old) == 2
    assert check_store(old).is_clean
    # And from then on all that is new works.
    store = open_store(old, 0, 12_000)
    store.pin("ns", ["n1"])
    store.put(key_of(9), make_kv(9), tenant="acme", ttl_s=60)
    store.put(key_of(10), make_kv(10))
    assert store.holds([key_of(1)]) == [True]
    assert store.stats("acme").entries == 1
    store.close()
    assert check_store(old).is_clean


def test_checking_changes_nothing(old: Path) -> None:
    assert check_store(old).is_clean
    assert mark(old) == 1
    assert_whole(old)


def test_killed_between_the_two_steps(old: Path) -> None:
    # The mark is there, the index is as it was.
    (old / "store.json").write_text(json.dumps({"format": "cacheblend-rag store", "version": 2}))
    assert check_store(old).is_clean
    assert_whole(old)


def test_read_as_it_is_where_it_may_not_be_written(old: Path) -> None:
    # pytest's folder cannot be reached by another user.
    reachable = Path(tempfile.mkdtemp())
    reachable.chmod(0o755)
    folder = reachable / "s"
    shutil.copytree(old, folder)
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    run(workers.read_only_version_1, folder)
    assert mark(folder) == 1
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o700)
    assert_whole(folder)
    shutil.rmtree(reachable)


def test_killed_at_any_moment(tmp_path: Path) -> None:
    chance = random.Random(5)
    store = open_store(tmp_path / "made", 0)
    for number in range(1, 5):
        store.put(key_of(number), make_kv(number))
    store.name("ns", [record(f"n{number}", number) for number in (1, 3)])
    store.close()
    as_version_1(tmp_path / "made", more_entries=20_000)
    begun = 0
    for turn in range(8):
        folder = tmp_path / str(turn)
        shutil.copytree(tmp_path / "made", folder)
        ready = tmp_path / f"ready{turn}"
        process = start(workers.open_and_say, folder, ready)
        until = time.monotonic() + 30
        while not ready.exists() and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.06))
        process.kill()
        process.join()
        begun += mark(folder) == 2
        assert_whole(folder)
        assert mark(folder) == 2
        store = open_store(folder, 0)
        assert store.stats().entries == 20_004
        store.close()
        connection = sqlite3.connect(folder / "index.sqlite")
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        connection.close()
    assert begun


def test_a_later_index(tmp_path: Path) -> None:
    open_store(tmp_path, 0).close()
    connection = sqlite3.connect(tmp_path / "index.sqlite")
    connection.execute("PRAGMA user_version = 3")
    connection.close()
    with pytest.raises(StoreFormatError, match="index is in format version 3, this cacheblend-rag reads up to 2"):
        open_store(tmp_path, 0)
