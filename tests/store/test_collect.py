"""`collect_garbage` removes what nobody can use, and nothing else."""

import os
import shutil
from pathlib import Path

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import check_store, collect_garbage
from cacheblend_rag.store.disk import DiskTier
from tests.store import workers
from tests.store.kit import files_of, key_of, make_kv, open_store, put, record, start
from tests.store.test_life import Clocks


def test_each_kind_of_garbage(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    clocks = Clocks(wall=1.0e9)
    store = clocks.open(folder)
    for number in range(1, 5):
        store.put(key_of(number), make_kv(number), ttl_s=60 if number < 3 else None)
    store.name("ns", [record("n1", 1), record("n3", 3)])
    store.close()
    stray = files_of(folder)[-1].with_name(f"{key_of(4)}.{'0' * 16}.safetensors")
    shutil.copyfile(files_of(folder)[-1], stray)
    part = folder / "tmp" / f"{'0' * 16}.1.part"
    part.write_bytes(b"x")
    # To the clock of this machine the two have expired long ago.
    report = collect_garbage(folder)
    assert (report.expired, report.unnamed, report.orphans) == (2, 0, 1)
    assert report.freed_bytes > 2 * make_kv(1).nbytes
    assert not stray.exists()
    assert not part.exists()
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


def test_room_in_the_index_is_given_back(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0)
    store.name("ns", [record(f"{number:0400}", 1) for number in range(5000)])
    store.clear()
    store.close()
    before = (tmp_path / "index.sqlite").stat().st_size
    assert collect_garbage(tmp_path).index_bytes > before // 2
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


@pytest.mark.parametrize("how", ["collected", "repaired"])
def test_what_is_to_be_found_again_by_its_files_is_no_garbage(tmp_path: Path, how: str) -> None:
    store = open_store(tmp_path, 0)
    put(store, *range(4))
    store.close()
    for name in ("index.sqlite", "mirror.sqlite"):
        (tmp_path / name).write_bytes(b"x" * (tmp_path / name).stat().st_size)
    # Opening heals, and has not found anything yet.
    DiskTier(tmp_path).close()
    if how == "collected":
        assert collect_garbage(tmp_path).orphans == 0
    else:
        check_store(tmp_path, repair=True)
    assert len(files_of(tmp_path)) == 4
    store = open_store(tmp_path, 0)
    assert store.holds([key_of(number) for number in range(4)]) == [True] * 4
