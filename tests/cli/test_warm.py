"""``warm``, ``ask`` and ``store`` on a tiny model, with the real embedding model and a real Chroma."""

import fcntl
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.store import check_store, open_store
from tests.cli.conftest import passages_of
from tests.command import read_rows, run
from tests.store.kit import damage, files_of, key_of, make_kv, record


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def warm(documents: Path, model_folder: Path, store: Path, tmp_path: Path) -> Any:
    """``warm`` with the documents and the tiny model; returns the row it wrote."""

    def call(*arguments: Any, code: int = 0, paths: list[Path] | None = None) -> dict[str, Any]:
        file = tmp_path / "warm.json"
        options = ["--library", store, "--model", model_folder, "--chunk-tokens", "40", "--json", file]
        run("warm", *(paths or [documents]), *options, *arguments, code=code)
        return read_rows(file)[0]

    return call


def passages_in(store: Path) -> dict[str, tuple[str, int]]:
    """Text and place of everything in Chroma, by id."""
    return {id: (text, int(about["start"])) for id, (text, about) in passages_of(store).items()}


def names_in(store: Path, tmp_path: Path) -> int:
    run("store", "stats", "--store", store, "--json", tmp_path / "stats.json")
    return int(read_rows(tmp_path / "stats.json")[0]["names"])


def test_the_second_time_nothing_is_encoded(warm: Any, store: Path, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        first = warm()
    finally:
        os.umask(before)
    assert (first["files"], first["passages"], first["encoded"]) == (3, 8, 8)
    assert len(passages_in(store)) == names_in(store, tmp_path) == 8
    second = warm()
    assert (second["encoded"], second["unchanged"], second["removed"]) == (0, 8, 0)
    assert second["kv_bytes"] == first["kv_bytes"] > 0
    # Other users cannot read it.
    for path in (store, store / "chroma", store / "kv", store / "library.json"):
        assert path.stat().st_mode & 0o077 == 0


def test_what_changed_is_replaced_or_deleted(warm: Any, documents: Path, store: Path, tmp_path: Path) -> None:
    warm()
    before = passages_in(store)
    (documents / "harbour.txt").unlink()
    text = (documents / "mara.md").read_text()
    (documents / "mara.md").write_text(text.replace("Oslo", "Bergen").replace("# Mara", "First.\n\n# Mara"))
    row = warm()
    assert row["removed"] == 3  # two of the harbour, one of Mara
    after = passages_in(store)
    # What stands behind the change has read it; the other files are as they were.
    assert row["encoded"] == sum("mara.md#" in id for id in after) == 4
    assert not any("harbour" in text or "Oslo" in text for text, _ in after.values())
    goat = next(id for id, (text, _) in before.items() if "goat" in text)
    assert after[goat][1] == before[goat][1] + len("First.\n\n") + len("Bergen") - len("Oslo")
    assert len(after) == names_in(store, tmp_path) == row["passages"]
    run("store", "check", "--store", store)


def test_what_cannot_be_read_and_what_is_of_others_stays(
    warm: Any, documents: Path, store: Path, tmp_path: Path, model_folder: Path
) -> None:
    latin, good = documents / "more" / "latin.txt", documents / "more" / "good.txt"
    latin.write_text("A goat.")
    good.write_text("Another goat.")
    warm(paths=[latin, good])
    latin.write_bytes("Åse".encode("latin-1"))
    good.write_text("A third goat.")
    # What was read before of a file that one names stays.
    row = warm(paths=[latin, good], code=1)
    assert (row["encoded"], row["removed"]) == (1, 1)
    assert {text for text, _ in passages_in(store).values()} == {"A goat.", "A third goat."}
    assert warm(paths=[documents / "more"], code=1)["removed"] == 1
    assert warm(paths=[documents / "mara.md", documents / "harbour.txt"])["removed"] == 0
    assert len(passages_in(store)) == names_in(store, tmp_path) == 9
    with BlendEngine.from_pretrained(model_folder, store=store / "kv") as engine:
        engine.add([Chunk("A rule.", "pml/s/m")])
    latin.unlink()
    warm()
    assert names_in(store, tmp_path) == 10


def test_an_estimate_leaves_nothing_behind(warm: Any, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_DISK_CODEC", "native")
    native = warm("--estimate")["disk_bytes"]
    # It counts what the codec makes of it.
    monkeypatch.setenv("CACHEBLEND_DISK_CODEC", "int8")
    row = warm("--estimate")
    assert native * 0.25 < row["disk_bytes"] < native * 0.8
    assert not store.exists()
    assert row["chunks"] == row["passages"] == 8
    assert row["seconds"] > 0
    done = warm()
    assert done["tokens"] == row["tokens"]
    assert row["disk_bytes"] == pytest.approx(done["kv_bytes"], rel=0.1)
    again = warm("--estimate")
    assert (again["chunks"], again["tokens"], again["disk_bytes"]) == (0, 0, 0)


def test_only_one_process_changes_a_store(warm: Any, documents: Path, store: Path, model_folder: Path) -> None:
    warm()
    with open(store / "warm.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = run("warm", documents, "--library", store, "--model", model_folder, code=1)
    assert "another process is changing" in result.stderr


def test_ask_shows_the_answer_its_sources_and_what_it_cost(warm: Any, store: Path, tmp_path: Path) -> None:
    warm()
    file = tmp_path / "ask.json"
    ask = partial(run, "ask", "Where was Mara born?", "--library", store, "--max-new-tokens", "8")
    settings = store / "library.json"
    as_it_was = settings.read_text()
    settings.write_text(as_it_was.replace('"finished": true', '"finished": false'))
    assert "warming has not come to its end" in ask().stderr
    settings.write_text(as_it_was)
    assert "warming" not in ask().stderr
    said = ask("--top-k", "4", "--compare", "--json", file).stdout
    blend, full = read_rows(file)
    assert (blend["method"], full["method"], full["selector"]) == ("blend", "full", "full")
    assert (blend["hits"], blend["misses"]) == (4, 0) and blend["charged_ratio"] < 1
    assert any(source["file"].endswith("mara.md") for source in blend["sources"])
    order = [(source["file"], source["start"]) for source in blend["sources"]]
    assert order == sorted(order)
    assert blend["answer"].split()[0] in said
    # At ratio 1 as full prefill does, and in a stream as at once.
    assert "tokens prefilled in full" in ask("--compare", "--json", file, "--ratio", "1").stdout
    first, second = read_rows(file)
    assert first["answer"] == second["answer"]
    whole, streamed = (ask(how).stdout.split("first token")[0] for how in ("--no-stream", "--stream"))
    assert streamed == whole
    for option in (("--ratio", "nan"), ("--ratio", "1.5"), ("--selector", "best")):
        assert len(ask(*option, code=2).stderr.splitlines()) == 1
    # Asked in turn of a model that is loaded once, each on its own.
    chat = run(
        "chat", "--library", store, "--max-new-tokens", "8", input="Where was Mara born?\n\nWhere was Mara born?\n"
    )
    assert chat.stdout.count(whole) == 2 and "6 of 6 chunks hit" in chat.stdout


def test_check_finds_a_damaged_file_and_repair_mends_it(warm: Any, store: Path, tmp_path: Path) -> None:
    warm()
    run("store", "check", "--store", store)
    damage(files_of(store / "kv")[0])
    run("store", "check", "--store", store, "--json", tmp_path / "check.json", code=1)
    row = read_rows(tmp_path / "check.json")[0]
    assert (row["clean"], row["repaired"], len(row["problems"])) == (False, False, 1)
    for options in (["--repair"], []):
        run("store", "check", "--store", store, *options)
    assert warm()["encoded"] == 1


def test_clear_asks_first(warm: Any, store: Path, tmp_path: Path) -> None:
    warm()
    run("store", "clear", "--store", store, input="n\n", code=1)
    assert names_in(store, tmp_path) == 8
    run("store", "clear", "--store", store, input="y\n")
    assert names_in(store, tmp_path) == 0
    assert "holds no passages" in run("ask", "Where?", "--library", store, code=2).stderr
    assert warm()["encoded"] == 8
    run("store", "clear", "--yes", "--store", store)
    assert names_in(store, tmp_path) == 0


def test_a_damaged_chroma_and_settings_file_are_errors_of_one_line(warm: Any, documents: Path, store: Path) -> None:
    warm()
    (store / "chroma" / "chroma.sqlite3").write_bytes(b"no database" * 1000)
    for command in (["ask", "Where?"], ["warm", documents]):
        [said] = run(*command, "--library", store, code=1).stderr.splitlines()
        assert str(store / "chroma") in said
    (store / "library.json").write_text('{"model": 1}')
    [said] = run("ask", "Where?", "--library", store, code=2).stderr.splitlines()
    assert "library.json" in said


@pytest.mark.parametrize("package", ["chromadb", "sentence_transformers"])
def test_no_package(warm: Any, documents: Path, store: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    [said] = run("warm", documents, "--library", store, "--model", "reference", code=2).stderr.splitlines()
    assert package in said and "-e '.[documents]'" in said
    assert not store.exists()
    assert warm("--estimate")["chunks"] == 8


def test_the_readmes_commands_answer_the_readmes_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    block = next(
        part for part in (root / "README.md").read_text().split("```") if part.strip().startswith("cacheblend-rag warm")
    )
    (tmp_path / "examples").symlink_to(root / "examples")
    monkeypatch.chdir(tmp_path)
    lines = block.strip().replace("Qwen/Qwen2.5-0.5B-Instruct", "reference").splitlines()
    said = [run(*shlex.split(line, comments=True)[1:]).output for line in lines]
    assert len(said) == 3
    assert "3 encoded" in said[1]
    assert "Sella Borler keeps a black horse." in said[2]
    assert "the same answer" in said[2]


def test_repair_and_clear_of_one_tenant(tmp_path: Path) -> None:
    one, figures = tmp_path / "one", tmp_path / "figures.json"
    store = open_store(one, 0)
    for number, tenant in ((1, ""), (2, "acme"), (3, "acme")):
        store.name(f"ns{tenant}", [record(f"n{number}", number)], tenant=tenant)
        store.put(key_of(number), make_kv(number), tenant=tenant)
    store.close()
    (one / "kv" / "09").mkdir()
    (one / "kv" / "09" / f"{key_of(9)}.safetensors").write_bytes(bytes(7))
    run("store", "check", "--repair", "--store", one, "--json", figures)
    assert read_rows(figures)[0]["freed_bytes"] == 7
    run("store", "stats", "--store", one, "--json", figures)
    assert read_rows(figures)[0]["tenants"]["acme"]["entries"] == 2
    run("store", "clear", "--store", one, "--tenant", "acme", "--yes")
    assert check_store(one).entries == 1
