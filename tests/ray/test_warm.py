"""Warming with actors of a real cluster, over a real Redis."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cacheblend_rag import BlendPrompt, Chunk, EngineConfig
from cacheblend_rag.cli.app import app
from cacheblend_rag.errors import BackendError, ConfigError
from cacheblend_rag.ray import WarmSummary, warm
from tests.ray.conftest import Opener, documents_of, workers

WORKER = "ray::MapWorker"


@pytest.fixture(autouse=True)
def _in_cluster(cluster: None) -> None:
    pass


def warm_all(source: Any, model: str, shared: dict[str, Any], **options: Any) -> WarmSummary:
    given: dict[str, Any] = {"actors": 2, "batch_documents": 4, "progress": lambda done, total: None}
    return warm(source, model=model, config=EngineConfig(**shared), **(given | options))


def test_a_corpus_is_computed_once_and_found_by_others(model: str, shared: dict[str, Any], open_one: Opener) -> None:
    documents = documents_of(20)
    steps: list[tuple[int, int | None]] = []
    first = warm_all(documents, model, shared, progress=lambda done, total: steps.append((done, total)))
    assert (first.documents, first.chunks, first.encoded, first.unchanged, first.failed) == (20, 80, 80, 0, [])
    assert first.tokens > 80 and first.seconds > 0
    assert steps[-1] == (20, 20)
    again = warm_all(documents, model, shared)
    assert (again.documents, again.chunks, again.encoded, again.unchanged, again.failed) == (20, 80, 0, 80, [])
    engine = open_one()
    assert len(engine.document("doc-7")) == 4
    result = engine.generate(BlendPrompt("Read.", engine.document("doc-7"), "Which?"), 4)
    assert (result.report.hits, result.report.misses) == (4, 0)
    alone = open_one(remote=None, names=None)
    alone.add([Chunk(text, id) for id, text in zip("abcd", documents[7]["chunks"], strict=True)])
    whole = warm_all([{"document": "doc-7", "chunks": documents[7]["chunks"][:2]}], model, shared)
    assert (whole.encoded, whole.unchanged) == (0, 2)
    assert len(engine.document("doc-7")) == 2


def test_what_fails_is_told_and_the_rest_is_done(model: str, shared: dict[str, Any]) -> None:
    bad = [
        {"document": "long", "chunks": ["first", "word " * 5000]},
        {"document": "blank", "text": " "},
        {"document": "none"},
    ]
    summary = warm_all([*documents_of(6), *bad], model, shared)
    assert (summary.documents, summary.chunks, summary.encoded) == (6, 24, 24)
    reasons = dict(summary.failed)
    assert sorted(reasons) == ["blank", "long", "none"]
    assert "tokens" in reasons["long"]


def test_any_dataset_of_ray(model: str, shared: dict[str, Any], tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet
    from ray import data

    pieces = [("b", 1, "Second."), ("a", 0, "Alpha one."), ("b", 0, "First."), ("a", 1, "Alpha two.")]
    columns = dict(zip(("name", "place", "body"), map(list, zip(*pieces, strict=True)), strict=True))
    parquet.write_table(pyarrow.table(columns), tmp_path / "pieces.parquet")
    found = data.read_parquet(str(tmp_path / "pieces.parquet"))
    summary = warm_all(found, model, shared, document="name", text="body", order="place")
    assert (summary.documents, summary.chunks, summary.encoded, summary.failed) == (2, 4, 4, [])
    same = warm_all([{"document": "b", "chunks": ["First.", "Second."]}], model, shared)
    assert (same.encoded, same.unchanged) == (0, 2)


def test_what_would_not_be_kept_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="remote"):
        warm(documents_of(1), model=model, config=EngineConfig())
    with pytest.raises(ConfigError, match="actors"):
        warm(documents_of(1), model=model, config=EngineConfig(remote="memory://x"), actors=0)


def test_a_folder_of_one_machine_is_a_store_for_all_workers(model: str, tmp_path: Path, open_one: Opener) -> None:
    summary = warm_all(documents_of(8), model, {"disk_codec": "native"}, store=tmp_path / "kv")
    assert (summary.documents, summary.encoded, summary.failed) == (8, 32, [])
    engine = open_one(tmp_path / "kv", remote=None, names=None)
    assert len(engine.ids()) == 32


def test_a_model_that_is_not_there_is_told(shared: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="warming ended"):
        warm_all(documents_of(1), str(tmp_path / "none"), shared)


def test_the_command_warms_a_folder(
    model: str, shared: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_one: Opener
) -> None:
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    for name in ("one.md", "deep/two.md"):
        (tmp_path / "docs" / name).write_text(f"The gate of {name} is open.\n\nAnother is shut.")
    for name, value in shared.items():
        monkeypatch.setenv(f"CACHEBLEND_{name.upper()}", value)
    command = ["warm", str(tmp_path / "docs"), "--ray", "--actors", "1", "--model", model]
    done = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    assert "2 chunks of 2 documents: 2 encoded, 0 there already" in done.output
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (row["documents"], row["encoded"], row["failed"]) == (2, 2, [])
    assert len(open_one().document("deep/two.md")) == 1
    done = CliRunner().invoke(app, [*command, "--estimate"])
    assert done.exit_code == 2
    assert "--estimate" in done.output
    assert CliRunner().invoke(app, ["warm", str(tmp_path), "--actors", "1"]).exit_code == 2


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.full)])
def test_workers_that_are_killed_lose_nothing(kills: int, model: str, shared: dict[str, Any], open_one: Opener) -> None:
    documents = documents_of(12 + 12 * kills, 8)
    killed: list[int] = []

    def kill(done: int, total: int | None) -> None:
        # Another one each time, while it works on a batch.
        if len(killed) < kills and done // 12 > len(killed):
            victim = next((pid for pid in workers(WORKER) if pid not in killed), None)
            if victim is not None:
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)

    summary = warm_all(documents, model, shared, progress=kill, batch_documents=2, retries=10)
    assert len(killed) == kills
    assert (summary.documents, summary.failed) == (len(documents), [])
    # What was stored before its worker died was not computed again, and is counted as there already.
    assert summary.encoded + summary.unchanged == summary.chunks == 8 * len(documents)
    again = warm_all(documents, model, shared)
    assert (again.encoded, again.unchanged) == (0, summary.chunks)
    engine = open_one()
    assert len(engine.ids()) == summary.chunks


def test_a_document_that_kills_its_worker_each_time_is_told(
    model: str, shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: set[int] = set()

    def kill(done: int, total: int | None) -> None:
        for pid in set(workers(WORKER)) - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)

    summary = warm_all(documents_of(30, 8), model, shared, progress=kill, batch_documents=10, retries=0)
    assert killed
    assert summary.documents + len(summary.failed) == 30
    assert all("died" in reason for _, reason in summary.failed)
