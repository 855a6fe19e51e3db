"""Warming with actors of a real cluster, over a real Redis, and documents as its rows."""

import importlib
import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cacheblend_rag import BlendPrompt, EngineConfig
from cacheblend_rag.cli.app import app
from cacheblend_rag.errors import BackendError, ConfigError, PromptError
from cacheblend_ray import WarmSummary, warm
from cacheblend_ray.rows import Columns, chunks_of, joined, rows_of
from cacheblend_ray.warming import Warmer, WarmJob
from integrations.ray.tests.conftest import Opener, documents_of, workers

WORKER = "ray::MapWorker"


def warm_all(source: Any, model: str, shared: dict[str, Any], **options: Any) -> WarmSummary:
    given: dict[str, Any] = {"actors": 2, "batch_documents": 4, "progress": lambda done, total: None}
    return warm(source, model=model, config=EngineConfig(**shared), **(given | options))


def batch_of(documents: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [each.get(name) for each in documents] for name in ("document", "chunks", "text")}


def test_a_corpus_is_computed_once(cluster: None, model: str, shared: dict[str, Any], open_one: Opener) -> None:
    documents = documents_of(40)
    bad = [{"document": "long", "chunks": ["first", "word " * 5000]}, {"document": "blank", "text": " "}]
    steps: list[tuple[int, int | None]] = []
    killed: list[int] = []

    def advance(done: int, total: int | None) -> None:
        steps.append((done, total))
        if not killed:
            killed.append(workers(WORKER)[0])
            os.kill(killed[0], signal.SIGKILL)

    first = warm_all([*documents, *bad], model, shared, progress=advance)
    assert killed
    assert (first.documents, first.chunks) == (40, 160)
    # What was stored before its worker died was not computed again, and is counted as there already.
    assert first.encoded + first.unchanged == 160
    assert first.tokens > first.encoded > 100
    assert steps[-1] == (42, 42)
    reasons = dict(first.failed)
    assert sorted(reasons) == ["blank", "long"]
    assert "tokens" in reasons["long"] and "blank" in reasons["blank"]
    again = warm_all(documents, model, shared, actors=1)
    assert (again.documents, again.chunks, again.encoded, again.unchanged, again.failed) == (40, 160, 0, 160, [])
    engine = open_one()
    assert len(engine.ids()) == 160
    result = engine.generate(BlendPrompt("Read.", engine.document("doc-7"), "Which?"), 4)
    assert (result.report.hits, result.report.misses) == (4, 0)


# What a worker does, without a cluster.


def test_a_worker_computes_nothing_twice(model: str, shared: dict[str, Any]) -> None:
    job = WarmJob(model, None, EngineConfig(**shared), Columns(), 256)
    batch = batch_of([*documents_of(5), {"document": "long", "chunks": ["first", "word " * 5000]}, {"document": ""}])
    first, again = (Warmer(job)(batch) for _ in range(2))
    told = dict(zip(first["document"], first["error"], strict=True))
    assert [name for name, error in told.items() if error] == ["", "long"]
    assert (sum(first["encoded"]), sum(again["encoded"])) == (20, 0)
    assert first["error"] == again["error"]
    shorter = Warmer(job)(batch_of([{"document": "doc-3", "chunks": documents_of(4)[3]["chunks"][:2]}]))
    assert (shorter["chunks"], shorter["encoded"], shorter["error"]) == ([2], [0], [""])


def test_what_does_not_reach_the_remote_tier_is_told(model: str, shared: dict[str, Any]) -> None:
    job = WarmJob(model, None, EngineConfig(**shared), Columns(), 256)
    worker = Warmer(job)
    assert worker._remote is not None
    worker._remote.holds = lambda keys: [False] * len(keys)  # type: ignore[method-assign]
    done = worker(batch_of(documents_of(2)))
    assert all("did not reach" in error for error in done["error"])


def test_what_would_not_be_kept_is_refused(cluster: None, model: str) -> None:
    with pytest.raises(ConfigError, match="remote"):
        warm(documents_of(1), model=model, config=EngineConfig())
    with pytest.raises(ConfigError, match="actors"):
        warm(documents_of(1), model=model, config=EngineConfig(remote="memory://x"), actors=0)
    assert warm([], model=model, config=EngineConfig(remote="memory://x")).documents == 0


def test_the_command_hands_on_what_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (extra ray)")
    asked: dict[str, Any] = {}

    def noted(paths: Any, **options: Any) -> WarmSummary:
        asked.update(options, paths=paths)
        options["progress"](2, None)
        return WarmSummary(1, 3, 2, 1, 30, [("two.md", "it is too long")], 0.5)

    module = importlib.import_module("cacheblend_ray.warming")
    monkeypatch.setattr(module, "warm", noted)
    monkeypatch.setattr(module, "connect", lambda address: nullcontext())
    monkeypatch.setenv("CACHEBLEND_REMOTE", "redis://cache:6379/0")
    (tmp_path / "one.md").write_text("text")
    command = [
        "warm-ray",
        str(tmp_path),
        "--model",
        "reference",
        "--actors",
        "3",
        "--gpus",
        "0.25",
        "--json",
        str(tmp_path / "out.json"),
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "3 chunks of 1 documents: 2 encoded, 1 there already" in done.output
    assert "two.md failed: it is too long" in done.output
    assert asked["paths"] == [tmp_path]
    assert (asked["actors"], asked["num_gpus"], asked["store"]) == (3, 0.25, None)
    assert asked["config"].remote.get_secret_value() == "redis://cache:6379/0"
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (row["documents"], row["failed"]) == (1, [["two.md", "it is too long"]])


# At full length.


@pytest.mark.full
def test_any_dataset_of_ray(cluster: None, model: str, shared: dict[str, Any], tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet
    from ray import data

    pieces = [("b", 1, "Second."), ("a", 0, "Alpha one."), ("b", 0, "First."), ("a", 1, "Alpha two.")]
    columns = dict(zip(("name", "place", "body"), map(list, zip(*pieces, strict=True)), strict=True))
    parquet.write_table(pyarrow.table(columns), tmp_path / "pieces.parquet")
    found = data.read_parquet(str(tmp_path / "pieces.parquet"))
    summary = warm_all(found, model, shared, actors=1, document="name", text="body", order="place")
    assert (summary.documents, summary.chunks, summary.encoded, summary.failed) == (2, 4, 4, [])
    same = warm_all([{"document": "b", "chunks": ["First.", "Second."]}], model, shared)
    assert (same.encoded, same.unchanged) == (0, 2)


@pytest.mark.full
def test_a_folder_is_a_store_for_all_workers(cluster: None, model: str, tmp_path: Path, open_one: Opener) -> None:
    summary = warm_all(documents_of(8), model, {"disk_codec": "native"}, store=tmp_path / "kv")
    assert (summary.documents, summary.encoded, summary.failed) == (8, 32, [])
    engine = open_one(tmp_path / "kv", remote=None, names=None)
    assert len(engine.ids()) == 32


@pytest.mark.full
def test_a_model_that_is_not_there_is_told(cluster: None, shared: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="warming ended"):
        warm_all(documents_of(1), str(tmp_path / "none"), shared)


@pytest.mark.full
def test_killed_workers_lose_nothing(cluster: None, model: str, shared: dict[str, Any], open_one: Opener) -> None:
    """Killed 20 times, always another one, in the middle of a batch."""
    kills = 20
    documents = documents_of(12 + 12 * kills, 8)
    killed: list[int] = []

    def kill(done: int, total: int | None) -> None:
        if len(killed) < kills and done // 12 > len(killed):
            victim = next((pid for pid in workers(WORKER) if pid not in killed), None)
            if victim is not None:
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)

    summary = warm_all(documents, model, shared, progress=kill, batch_documents=2, retries=20)
    assert len(killed) == kills
    assert (summary.documents, summary.failed) == (len(documents), [])
    assert summary.encoded + summary.unchanged == summary.chunks == 8 * len(documents)
    again = warm_all(documents, model, shared)
    assert (again.encoded, again.unchanged) == (0, summary.chunks)
    assert len(open_one().ids()) == summary.chunks


@pytest.mark.full
def test_a_document_that_kills_its_worker_each_time_is_told(cluster: None, model: str, shared: dict[str, Any]) -> None:
    killed: set[int] = set()

    def kill(done: int, total: int | None) -> None:
        for pid in set(workers(WORKER)) - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)

    summary = warm_all(documents_of(30, 8), model, shared, progress=kill, batch_documents=10, retries=0)
    assert killed
    assert summary.documents + len(summary.failed) == 30
    assert all("worker ended" in reason for _, reason in summary.failed)


def words(text: str) -> int:
    return len(text.split())


def test_files_are_called_by_their_paths_below_the_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a.md", "deep/b.txt", "c.bin", ".hidden.md"):
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "blank.md").write_text(" \n")
    (tmp_path / "bad.md").write_bytes(b"\xff\xfe\xff")
    assert [row["document"] for row in rows_of(tmp_path)] == ["a.md", "deep/b.txt"]
    assert rows_of([str(tmp_path / "a.md")]) == [{"document": "a.md", "text": "text of a.md"}]
    assert len(rows_of([tmp_path, tmp_path])) == 2
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.md").write_text("another text")
    with pytest.raises(ConfigError, match=r"'a\.md'"):
        rows_of([tmp_path / "a.md", other])


def test_documents_of_both_frameworks() -> None:
    from langchain_core.documents import Document
    from llama_index.core import Document as LlamaDocument

    pages = [Document("one", metadata={"source": "a.pdf", "page": 0}), Document("two", metadata={"source": "a.pdf"})]
    assert rows_of([*pages, Document("three", id="x")]) == [
        {"document": "a.pdf", "text": "one\n\ntwo"},
        {"document": "x", "text": "three"},
    ]
    assert rows_of([LlamaDocument(text="four", id_="y")]) == [{"document": "y", "text": "four"}]


@pytest.mark.parametrize(
    "given", [[{"text": "x"}], [3], [{"document": "a", "text": "x"}, {"document": "a", "text": "y"}]]
)
def test_what_is_no_document_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError):
        rows_of(given)


def test_chunks_have_the_ids_that_the_server_gives() -> None:
    columns = Columns("path", "body", "pieces")
    cut = chunks_of({"path": "d", "body": "one two.\n\nthree four."}, columns, words, 2)
    given = chunks_of({"path": "d", "pieces": ["one two.", "three four."]}, columns, words, 100)
    assert cut == given
    assert [chunk.start for chunk in cut] == [0, 10]


@pytest.mark.parametrize(
    "row",
    [
        {"document": "", "text": "x"},
        {"document": None, "text": "x"},
        {"document": "d"},
        {"document": "d", "text": 3},
        {"document": "d", "text": " \n"},
        {"document": "d", "chunks": []},
        {"document": "d", "chunks": ["x", " "]},
    ],
)
def test_a_row_without_a_document_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(PromptError):
        chunks_of(row, Columns(), words, 100)


def test_rows_of_one_document_are_joined_in_their_order() -> None:
    group = {"document": ["d", "d", "d"], "text": ["c", "a", "b"], "n": [3, 1, 2]}
    assert joined(group, Columns(), "n") == {"document": ["d"], "chunks": [["a", "b", "c"]]}
