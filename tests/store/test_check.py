"""`check_store` finds what is wrong, and mends it."""

import os
import re
import shlex
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.cli.app import app
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import KVStore, check_store, collect_garbage
from cacheblend_rag.store.disk import DiskTier
from cacheblend_rag.store.folder import StoreFolder
from tests.core.documents.naive import small_model
from tests.core.documents.texts import TOLERANCE, Text, distance
from tests.families import tiny_tokenizer
from tests.store import workers
from tests.store.kit import add, files_of, is_held, key_of, make_kv, open_store, put, record, start
from tests.store.test_life import Clocks

Damage = Callable[[Path], None]

TEXT = Text.of("d", [8, 9, 7, 8], [3, 0, 2], 5)
READ = "document 'd' does not match the keys of its chunks"


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


def add_file(folder: Path) -> None:
    path = files_of(folder)[0]
    shutil.copyfile(path, path.with_name(f"{key_of(0)}.{'0' * 16}.safetensors"))


def leave_part(folder: Path) -> None:
    (folder / "tmp" / f"{'0' * 16}.1.part").write_bytes(b"x")


def change_name(folder: Path) -> None:
    sql(folder, f"UPDATE nodes SET key = '{key_of(9)}' WHERE id = 'n0'")


def change_count(folder: Path) -> None:
    sql(folder, "UPDATE counters SET value = value + 1 WHERE name = 'entry_bytes'")


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    with BlendEngine(small_model(), tiny_tokenizer(), **engine_settings(self_check=False), store=tmp_path) as engine:
        engine.add([*TEXT.chunks, Chunk("t5 t6", "alone")])
    return tmp_path


@pytest.mark.parametrize(
    ("statement", "problems", "names", "entries"),
    [
        ("UPDATE members SET start = start + 1 WHERE arrival = 1", ["name 'd-1' does not match", READ], 4, 2),
        ("UPDATE members SET arrival = 'x' WHERE arrival = 1", ["name 'd-1' does not match", READ], 4, 2),
        ("UPDATE members SET ends = 'text' WHERE arrival = 0", ["name 'd-0' does not match", READ], 4, 1),
        ("UPDATE members SET expires_at = 5 WHERE arrival = 3", ["name 'd-3' does not match"], 4, 4),
        # The name is sound, and belongs to a document that is not there.
        ("UPDATE members SET document = 9 WHERE arrival = 3", ["name 'd-3' does not match"], 4, 4),
        (
            "UPDATE documents SET namespace = 'x'",
            ["name 'd-0' does not", "name 'd-1' does not", "name 'd-2' does not", "name 'd-3' does not", READ],
            1,
            1,
        ),
        ("UPDATE documents SET tokens = 5", [READ], 5, 5),
        ("UPDATE documents SET separator = 'abc'", [READ], 5, 5),
        ("UPDATE documents SET name = 'e'", ["document 'e' does not match"], 5, 5),
        (
            "INSERT INTO documents VALUES (7, 'x', 'y', NULL, x'', 0)",
            ["document 'y'", "1 rows describe pieces of documents"],
            5,
            5,
        ),
        (
            "INSERT INTO members VALUES (99, 7, 0, 0, NULL, 1, '', x'', NULL, 0)",
            ["1 rows describe pieces of documents"],
            5,
            5,
        ),
    ],
)
def test_damaged_documents(documents: Path, statement: str, problems: list[str], names: int, entries: int) -> None:
    sql(documents, statement)
    for repair in (False, True):
        found = check_store(documents, repair=repair).problems
        assert len(found) == len(problems), found
        for problem, part in zip(found, problems, strict=True):
            assert part in problem
    report = check_store(documents)
    assert (report.problems, report.names, report.entries) == ([], names, entries)
    with BlendEngine(small_model(), tiny_tokenizer(), **engine_settings(self_check=False), store=documents) as engine:
        engine.add(TEXT.chunks)
        assert engine.document("d") == ["d-0", "d-1", "d-2", "d-3"]
        for number in range(4):
            assert distance(engine, f"d-{number}", TEXT.context(number, range(4))) < TOLERANCE
    assert check_store(documents).is_clean


def test_what_no_document_leads_to_is_collected(documents: Path) -> None:
    with BlendEngine(small_model(), tiny_tokenizer(), **engine_settings(self_check=False), store=documents) as engine:
        # As if the process that encoded it had died before it was named.
        kv = make_kv(1)
        engine._store.put(key_of(1), kv)
        engine.delete(["d-1"])
    report = collect_garbage(documents, unnamed_age_s=0.0)
    assert report.unnamed == 1
    report = check_store(documents)
    assert (report.problems, report.names, report.entries) == ([], 4, 2)


def sql(folder: Path, statement: str) -> None:
    connection = sqlite3.connect(folder / "index.sqlite")
    connection.execute(statement)
    connection.commit()


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
        (add_file, "belongs to no entry", 4, 4),
        (leave_part, "was left by a killed process", 4, 4),
        (change_name, "the record of name 'n0' does not match", 4, 3),
        (change_count, "the index counts", 4, 4),
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


def test_the_next_opening_finishes_what_was_begun(folder: Path) -> None:
    # A file that lost its entry and was not yet removed, and one that got its entry and is not yet in its place.
    add_file(folder)
    sql(folder, f"INSERT INTO removals VALUES ('{key_of(0)}.{'0' * 16}.safetensors')")
    path = max(files_of(folder))
    path.rename(folder / "tmp" / f"{path.name}.part")
    for file in (folder / "tmp" / f"{path.name}.part", path):
        report = check_store(folder)
        assert (report.entries, [problem for problem in report.problems if "killed process" not in problem]) == (4, [])
        assert file.exists()
        open_store(folder, 0).close()
    assert len(files_of(folder)) == 4


def test_foreign_file_is_reported_and_left(folder: Path) -> None:
    (folder / "kv" / "notes.txt").write_text("x")
    assert "move it elsewhere" in check_store(folder, repair=True).problems[0]
    assert (folder / "kv" / "notes.txt").exists()


def test_the_error_of_a_damaged_index_says_how_it_is_mended(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    moved = Path(shutil.copytree(folder, tmp_path_factory.mktemp("elsewhere") / "two words"))
    (moved / "index.sqlite").write_bytes(b"hello" * 3000)
    [problem] = check_store(moved).problems
    assert "is damaged" in problem
    said = re.search("`cacheblend-rag (.*)`", problem)
    assert said is not None
    result = CliRunner().invoke(app, shlex.split(said[1]))
    assert result.exit_code == 0, result.output
    assert "4 names and 4 entries of KV were restored from its mirror" in result.output
    assert check_store(moved).is_clean
    with pytest.raises(StoreError, match="is not a file name") as error:
        StoreFolder(moved).file_path("../x")
    assert f"--store '{moved}'" in str(error.value)


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("how", ["zeros", "cut", "text"])
def test_damaged_index_is_restored(folder: Path, how: str, mirrored: bool) -> None:
    for name in ("index.sqlite",) if mirrored else ("index.sqlite", "mirror.sqlite"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes({"zeros": bytes(len(data)), "cut": data[:3000], "text": b"hello" * 3000}[how])
    change_layer(folder)
    report = check_store(folder)
    assert "damaged" in report.problems[0]
    report = check_store(folder, repair=True)
    assert report.repaired
    assert any(f"{4 if mirrored else 0} names and" in problem for problem in report.problems)
    report = check_store(folder)
    assert (report.problems, report.entries, report.names) == ([], 3, 4 if mirrored else 0)
    store: KVStore = open_store(folder, 0)
    assert is_held(store, 2)


def test_while_in_use(folder: Path) -> None:
    store = open_store(folder, 0)
    store.put(key_of(7), make_kv(7))
    report = check_store(folder)
    assert (report.problems, report.entries) == ([], 5)
    assert not check_store(folder, repair=True).repaired
    store.put(key_of(8), make_kv(8))
    assert store.stats().entries == 6


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
