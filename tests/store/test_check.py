"""`check_store` finds what is wrong, mends it, and removes what nothing needs."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheblend_rag.store import check_store
from tests.store import workers
from tests.store.kit import add, damage, files_of, held, key_of, open_store, start


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = open_store(tmp_path, 0)
    add(store, *range(4))
    store.close()
    return tmp_path


def change_head(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"start"', b'"stare"'))


def another_chunk(file: Path) -> None:
    shutil.copyfile(files_of(file.parents[2])[-1], file)


@pytest.mark.parametrize("harm", [damage, change_head, Path.unlink, another_chunk])
def test_damage_is_found_and_mended(folder: Path, harm: Callable[[Path], None]) -> None:
    files = files_of(folder)
    report = check_store(folder)
    assert (report.entries, report.names, report.problems, report.repaired) == (4, 4, [], False)
    assert report.bytes == sum(path.stat().st_size for path in files)
    harm(files[0])
    for _ in range(2):
        report = check_store(folder)
        assert (len(report.problems), report.repaired) == (1, False)
    report = check_store(folder, repair=True)
    assert (len(report.problems), report.repaired) == (1, True)
    report = check_store(folder)
    assert (report.problems, report.entries, report.names) == ([], 3, 4)
    assert files_of(folder) == files[1:]


def test_foreign_file_is_reported_and_left(folder: Path) -> None:
    (folder / "kv" / "notes.txt").write_text("x")
    assert len(check_store(folder, repair=True).problems) == 1
    assert (folder / "kv" / "notes.txt").exists()


def test_while_others_write(tmp_path: Path) -> None:
    processes = [start(workers.work_together, tmp_path, seed, 60, None) for seed in range(2)]
    while any(process.is_alive() for process in processes):
        if (tmp_path / "index.sqlite").exists():
            report = check_store(tmp_path, repair=True)
            assert (report.problems, report.freed_bytes) == ([], 0)
    assert [process.exitcode for process in processes] == [0, 0]
    assert check_store(tmp_path).is_clean


def test_a_repair_removes_what_nothing_needs(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    store = open_store(folder, 0)
    add(store, 1, 3)
    store.close()
    orphan, part = folder / "kv" / "09" / f"{key_of(9)}.safetensors", folder / "tmp" / "0.part"
    orphan.parent.mkdir()
    for path in (orphan, part):
        path.write_bytes(b"x")
    os.utime(part, (0, 0))
    assert check_store(folder).is_clean and orphan.exists()
    report = check_store(folder, repair=True)
    assert (report.problems, report.repaired, report.freed_bytes) == ([], False, 1)
    assert not orphan.exists() and not part.exists()
    store = open_store(folder, 0)
    assert held(store, range(1, 5)) == [1, 3]
    assert store.names.ids("ns") == ["n1", "n3"]
