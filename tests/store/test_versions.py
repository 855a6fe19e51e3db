"""Folders of format version 1, and indexes of version 2, are brought up to date, or read as they are."""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import StoreFormatError, StoreReadOnlyError
from cacheblend_rag.store import check_store, open_store
from tests.core.documents.texts import TOLERANCE, Text, distance
from tests.families import tiny_model, tiny_tokenizer
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

# And as version 2 made them.
VERSION_2 = """
CREATE TABLE entries (
    key TEXT PRIMARY KEY, file TEXT NOT NULL, bytes INTEGER NOT NULL, digest BLOB NOT NULL, last_used INTEGER NOT NULL,
    tenant TEXT NOT NULL DEFAULT '', added_at REAL NOT NULL DEFAULT 0, expires_at REAL, pinned INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE pending (file TEXT PRIMARY KEY, writer TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE deletions (seq INTEGER PRIMARY KEY, key TEXT NOT NULL);
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE nodes (
    seq INTEGER PRIMARY KEY, namespace TEXT NOT NULL, id TEXT NOT NULL, key TEXT NOT NULL, text_hash TEXT NOT NULL,
    token_ids BLOB NOT NULL, checksum INTEGER NOT NULL, pinned INTEGER NOT NULL DEFAULT 0, UNIQUE (namespace, id)
);
CREATE TABLE changes (seq INTEGER PRIMARY KEY, node INTEGER NOT NULL);
CREATE TABLE namespaces (namespace TEXT PRIMARY KEY, tenant TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE tenants (
    tenant TEXT PRIMARY KEY, entries INTEGER NOT NULL, bytes INTEGER NOT NULL, names INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE moment (one INTEGER PRIMARY KEY CHECK (one = 1), now REAL NOT NULL, wall REAL NOT NULL);
INSERT OR IGNORE INTO counters VALUES ('entry_bytes', 0), ('pinned_bytes', 0), ('clock', 0), ('revision', 0);
INSERT OR IGNORE INTO tenants VALUES ('', 0, 0, 0);
CREATE INDEX entries_by_use ON entries (pinned, last_used);
CREATE INDEX entries_by_expiry ON entries (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX nodes_by_key ON nodes (key);
CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN
    UPDATE counters SET value = value + new.bytes WHERE name = 'entry_bytes';
    UPDATE counters SET value = value + new.bytes WHERE name = 'pinned_bytes' AND new.pinned;
    UPDATE tenants SET entries = entries + 1, bytes = bytes + new.bytes WHERE tenant = new.tenant;
END;
CREATE TRIGGER entry_deleted AFTER DELETE ON entries BEGIN
    UPDATE counters SET value = value - old.bytes WHERE name = 'entry_bytes';
    UPDATE counters SET value = value - old.bytes WHERE name = 'pinned_bytes' AND old.pinned;
    UPDATE tenants SET entries = entries - 1, bytes = bytes - old.bytes WHERE tenant = old.tenant;
    INSERT INTO deletions (key) VALUES (old.key);
END;
CREATE TRIGGER entry_pinned AFTER UPDATE OF pinned ON entries BEGIN
    UPDATE counters SET value = value + (new.pinned - old.pinned) * new.bytes WHERE name = 'pinned_bytes';
END;
CREATE TRIGGER entry_claimed AFTER UPDATE OF tenant ON entries BEGIN
    UPDATE tenants SET entries = entries - 1, bytes = bytes - old.bytes WHERE tenant = old.tenant;
    UPDATE tenants SET entries = entries + 1, bytes = bytes + new.bytes WHERE tenant = new.tenant;
END;
CREATE TRIGGER node_added AFTER INSERT ON nodes BEGIN
    UPDATE counters SET value = value + 1 WHERE name = 'revision';
    UPDATE tenants SET names = names + 1 WHERE tenant =
        ifnull((SELECT tenant FROM namespaces WHERE namespace = new.namespace), '');
END;
CREATE TRIGGER node_changed AFTER UPDATE OF key, text_hash, token_ids ON nodes BEGIN
    UPDATE counters SET value = value + 1 WHERE name = 'revision';
END;
CREATE TRIGGER node_removed AFTER DELETE ON nodes BEGIN
    UPDATE counters SET value = value + 1 WHERE name = 'revision';
    UPDATE tenants SET names = names - 1 WHERE tenant =
        ifnull((SELECT tenant FROM namespaces WHERE namespace = old.namespace), '');
END;
CREATE TRIGGER node_addition_noted AFTER INSERT ON nodes BEGIN
    INSERT INTO changes (node) VALUES (new.seq);
END;
CREATE TRIGGER node_change_noted AFTER UPDATE OF key, text_hash, token_ids ON nodes BEGIN
    INSERT INTO changes (node) VALUES (new.seq);
END;
CREATE TRIGGER node_removal_noted AFTER DELETE ON nodes BEGIN
    INSERT INTO changes (node) VALUES (old.seq);
END;
CREATE TRIGGER changes_forgotten AFTER INSERT ON changes BEGIN
    DELETE FROM changes WHERE seq <= new.seq - 10000;
END;
CREATE TRIGGER node_pinned AFTER UPDATE OF key, pinned ON nodes WHEN old.pinned OR new.pinned BEGIN
    UPDATE entries SET pinned = EXISTS (SELECT 1 FROM nodes WHERE nodes.key = entries.key AND nodes.pinned)
    WHERE key IN (old.key, new.key);
END;
CREATE TRIGGER pinned_node_removed AFTER DELETE ON nodes WHEN old.pinned BEGIN
    UPDATE entries SET pinned = EXISTS (SELECT 1 FROM nodes WHERE nodes.key = entries.key AND nodes.pinned)
    WHERE key = old.key;
END;
PRAGMA user_version = 2;
"""


def as_version_2(folder: Path) -> None:
    """Write the index of a closed store, whose chunks were all encoded alone, the way version 2 did."""
    path = folder / "index.sqlite"
    connection = sqlite3.connect(path)
    version_2 = sqlite3.connect(":memory:")
    version_2.executescript(VERSION_2)
    tables = [row[0] for row in version_2.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        columns = ", ".join(row[1] for row in version_2.execute(f"PRAGMA table_info({table})"))
        version_2.execute(f"DELETE FROM {table}")
        rows = connection.execute(f"SELECT {columns} FROM {table}").fetchall()
        version_2.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * columns.count(',') + '?')})", rows)
    version_2.commit()
    connection.close()
    path.unlink()
    connection = sqlite3.connect(path)
    version_2.backup(connection)
    version_2.close()
    connection.execute("PRAGMA journal_mode=WAL")
    connection.close()


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
    connection.execute("PRAGMA user_version = 4")
    connection.close()
    with pytest.raises(StoreFormatError, match="index is in format version 4, this cacheblend-rag reads up to 3"):
        open_store(tmp_path, 0)


DOCUMENT = Text.of("d", [8, 9, 7], [3, 0], 5)


@pytest.fixture
def version_2(tmp_path: Path) -> Path:
    """Return a folder in which an engine of version 2 has kept the chunks of a document and one of none, and pinned two."""
    folder = tmp_path / "v2"
    # The separator was not there yet either.
    with open_engine(folder, context="none") as engine:
        engine.add([*DOCUMENT.chunks, Chunk("t5 t6 t7", "alone")])
        engine.pin(["d-1", "alone"])
    as_version_2(folder)
    return folder


def open_engine(folder: Path, **values: Any) -> BlendEngine:
    settings = {"recompute_ratio": 0.0, "selector": "none", "self_check": False, "ram_bytes": 0} | values
    return BlendEngine(tiny_model("llama"), tiny_tokenizer(), config=BlendConfig(**settings), store=folder)


def test_version_2_is_served_as_encoded_alone(version_2: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert check_store(version_2).is_clean
    for _ in range(2):
        with open_engine(version_2) as engine:
            prompt = BlendPrompt("t5", ["d-0", "d-1", "d-2", "alone"], "t6 t7")
            assert engine.prefill(prompt).report.hits == 4
            for number in range(3):
                assert distance(engine, f"d-{number}", ()) < TOLERANCE
            assert engine.places(["d-0", "alone"]) == [None, None]
    # Said once, when the index is brought up to date.
    said = [record.message for record in caplog.records if "written by an earlier version" in record.message]
    assert len(said) == 1
    assert "its KV is served as that; add the documents again" in said[0]
    assert check_store(version_2).is_clean


@pytest.mark.parametrize("separator", ["", "t3 t4"])
def test_documents_of_version_2_are_encoded_again_once_they_are_added(version_2: Path, separator: str) -> None:
    with open_engine(version_2, separator=separator) as engine:
        apart = engine._assembler.rules.separator
        for there in ([1], [0, 1], [0, 1, 2]):
            engine.add([DOCUMENT.chunk(number) for number in there])
            for number in range(3):
                context = DOCUMENT.context(number, there, apart) if number in there else ()
                assert distance(engine, f"d-{number}", context, apart if number in there else ()) < TOLERANCE
        assert distance(engine, "alone", ()) < TOLERANCE
        assert engine.store.stats().entries == 4
        pinned = engine.store.stats().pinned_bytes
        assert pinned > 0
        engine.unpin(["d-1", "alone"])
        assert engine.store.stats().pinned_bytes == 0
    assert check_store(version_2).is_clean


def test_a_miss_of_version_2_is_encoded_alone(version_2: Path) -> None:
    with open_engine(version_2, separator="t3 t4") as engine:
        keys = [record.key for record in engine.records(["d-1", "d-2"]) if record is not None]
        for key in keys:
            engine.store.discard(key)
        engine.prefill(BlendPrompt("t5", ["d-1", "d-2"], "t6 t7"))
        engine.flush()
        assert engine.store.holds(keys) == [True, True]
        assert distance(engine, "d-2", ()) < TOLERANCE


def test_version_2_is_read_where_it_may_not_be_written(version_2: Path) -> None:
    reachable = Path(tempfile.mkdtemp())
    reachable.chmod(0o755)
    folder = reachable / "s"
    shutil.copytree(version_2, folder)
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    run(read_only_version_2, folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o700)
    connection = sqlite3.connect(folder / "index.sqlite")
    assert connection.execute("PRAGMA user_version").fetchone() == (2,)
    connection.close()
    shutil.rmtree(reachable)


def read_only_version_2(folder: Path) -> None:
    """Answer from a folder of index version 2 that may not be written."""
    # Libraries are imported when they are first needed, and another user may not be able to read them.
    with tempfile.TemporaryDirectory() as other, open_engine(Path(other)) as engine:
        engine.add(DOCUMENT.chunks)
        engine.prefill(BlendPrompt("t5", ["d-0"], "t6 t7"))
    if os.getuid() == 0:
        for path in [*folder.rglob("*"), folder]:
            os.chown(path, 65534, 65534)
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    with open_engine(folder) as engine:
        assert engine.prefill(BlendPrompt("t5", ["d-0", "d-1", "alone"], "t6 t7")).report.hits == 3
        assert engine.places(["d-0"]) == [None]
        assert (engine.document("d"), engine.store.targets("", ["d-0"])) == ([], [None])
        assert engine.estimate(DOCUMENT.chunks).chunks == 2
        with pytest.raises(StoreReadOnlyError):
            engine.add(DOCUMENT.chunks)
        for number in range(3):
            assert distance(engine, f"d-{number}", ()) < TOLERANCE
