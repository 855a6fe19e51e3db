"""`check_store` finds what is wrong, and mends it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import check_store, collect_garbage
from tests.store import workers
from tests.store.kit import add, files_of, key_of, make_kv, open_store, record, start
from tests.store.test_life import Clock

Damage = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = open_store(tmp_path, 0)
    add(store, *range(4))
    store.close()
    return tmp_path


def change_layer(folder: Path) -> None:
    path = files_of(folder)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def change_head(folder: Path) -> None:
    path = files_of(folder)[0]
    path.write_bytes(path.read_bytes().replace(b'"start"', b'"stare"'))


def remove_file(folder: Path) -> None:
    files_of(folder)[0].unlink()


def swap_files(folder: Path) -> None:
    files = files_of(folder)
    shutil.copyfile(files[1], files[0])


def test_sound(folder: Path) -> None:
    report = check_store(folder)
    assert report.is_clean
    assert (report.entries, report.names, report.problems, report.repaired) == (4, 4, [], False)
    assert report.bytes == sum(path.stat().st_size for path in files_of(folder))


@pytest.mark.parametrize(
    ("damage", "problem", "entries", "names"),
    [
        (change_layer, "does not match its checksum", 3, 4),
        (change_head, "does not match its digest", 3, 4),
        (remove_file, "is missing", 3, 4),
        (swap_files, "belongs to key", 3, 4),
    ],
)
def test_damage(folder: Path, damage: Damage, problem: str, entries: int, names: int) -> None:
    damage(folder)
    for _ in range(2):
        report = check_store(folder)
        assert len(report.problems) == 1
        assert problem in report.problems[0]
        assert not report.repaired
    report = check_store(folder, repair=True)
    assert report.repaired
    assert problem in report.problems[0]
    report = check_store(folder)
    assert (report.problems, report.entries, report.names) == ([], entries, names)
    assert len(files_of(folder)) == entries


def test_foreign_file_is_reported_and_left(folder: Path) -> None:
    (folder / "kv" / "notes.txt").write_text("x")
    assert "move it elsewhere" in check_store(folder, repair=True).problems[0]
    assert (folder / "kv" / "notes.txt").exists()


@pytest.mark.parametrize("how", ["zeros", "cut", "text", "page"])
def test_a_damaged_index_is_refused(folder: Path, how: str) -> None:
    path = folder / "index.sqlite"
    data = path.read_bytes()
    page = data[: 3 * 4096] + bytes(4096) + data[4 * 4096 :]
    path.write_bytes({"zeros": bytes(len(data)), "cut": data[:3000], "text": b"hello" * 3000, "page": page}[how])
    for repair in (False, True):
        with pytest.raises(StoreError, match="is damaged"):
            check_store(folder, repair=repair)


def test_while_in_use(folder: Path) -> None:
    store = open_store(folder, 0)
    store.put(key_of(7), make_kv(7))
    report = check_store(folder)
    assert (report.problems, report.entries) == ([], 5)
    assert not check_store(folder, repair=True).repaired
    store.put(key_of(8), make_kv(8))
    assert store.stats().entries == 6


def test_room_in_the_index_is_given_back(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0)
    store.name("ns", [record(f"{number:0400}", 1) for number in range(5000)])
    store.clear()
    store.close()
    before = (tmp_path / "index.sqlite").stat().st_size
    collect_garbage(tmp_path)
    assert (tmp_path / "index.sqlite").stat().st_size < before // 2
    assert check_store(tmp_path).is_clean


def test_while_others_write(tmp_path: Path) -> None:
    processes = [start(workers.work_together, tmp_path, seed, 60, None) for seed in range(2)]
    while any(process.is_alive() for process in processes):
        if (tmp_path / "index.sqlite").exists():
            assert collect_garbage(tmp_path).orphans == 0
    assert [process.exitcode for process in processes] == [0, 0]
    assert check_store(tmp_path).is_clean


def test_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no folder"):
        collect_garbage(tmp_path / "x")
    with pytest.raises(StoreError, match="is empty"):
        collect_garbage(tmp_path)
    assert os.listdir(tmp_path) == []


def test_each_kind_of_garbage(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    store = Clock(1.0e9).open(folder)
    for number in range(1, 5):
        store.put(key_of(number), make_kv(number), ttl_s=60 if number < 3 else None)
    store.name("ns", [record("n1", 1), record("n3", 3)])
    store.close()
    orphan, part = folder / "kv" / "09" / f"{key_of(9)}.safetensors", folder / "tmp" / "0.part"
    orphan.parent.mkdir()
    for path in (orphan, part):
        path.write_bytes(b"x")
    os.utime(part, (0, 0))
    # To the clock of this machine the two have expired long ago.
    report = collect_garbage(folder)
    assert (report.expired, report.unnamed, report.orphans) == (2, 0, 1)
    assert report.freed_bytes > 2 * make_kv(1).nbytes
    assert not orphan.exists() and not part.exists()
    assert len(files_of(folder)) == 2
    report = collect_garbage(folder, unnamed_age_s=10**9 * 10)
    assert (report.expired, report.unnamed, report.orphans) == (0, 0, 0)
    report = collect_garbage(folder, unnamed_age_s=3600)
    assert (report.unnamed, report.freed_bytes > 0) == (1, True)
    store = open_store(folder, 0)
    assert store.holds([key_of(number) for number in range(1, 5)]) == [False, False, True, False]
    assert store.names.ids("ns") == ["n1", "n3"]
    store.close()
    assert check_store(folder).is_clean


def test_what_nobody_names_goes_in_time(tmp_path: Path) -> None:
    clock = Clock()
    store = clock.open(tmp_path)
    for number in (1, 2):
        store.put(key_of(number), make_kv(number))
    store.name("ns", [record("n1", 1)])
    for days, held in ((29, [True, True]), (2, [True, False])):
        clock.passes(days * 86400)
        store.put(key_of(3 + days), make_kv(3 + days))
        assert store.holds([key_of(1), key_of(2)]) == held
