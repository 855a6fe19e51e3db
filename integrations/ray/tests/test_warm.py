"""Warming with actors of a real cluster, over a real Redis, and documents as its rows."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cacheblend_rag import BlendPrompt, EngineConfig
from cacheblend_rag.cli.app import app
from cacheblend_rag.errors import BackendError, ConfigError
from cacheblend_ray import WarmSummary, warm
from cacheblend_ray.warming import Warmer
from integrations.ray.tests.conftest import Opener, documents_of, workers

WORKER = "ray::MapWorker"
LONG = {"document": "long", "chunks": ["first", "word " * 5000]}


def warm_all(source: Any, model: str, shared: dict[str, Any], **options: Any) -> WarmSummary:
    given: dict[str, Any] = {"actors": 2, "batch_documents": 4}
    return warm(source, model=model, config=EngineConfig(**shared), **(given | options))


def batch_of(documents: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [each.get(name) for each in documents] for name in ("document", "chunks", "text")}


def test_a_corpus_is_computed_once(cluster: None, model: str, shared: dict[str, Any], open_one: Opener) -> None:
    documents = documents_of(24)
    first = warm_all([*documents, LONG, {"document": "blank", "text": " "}], model, shared)
    # What was stored before another document of its batch failed is counted as there already.
    assert (first.documents, first.chunks) == (24, 96)
    assert first.tokens > first.encoded > 48
    assert sorted(name for name, _ in first.failed) == ["blank", "long"]
    again = warm_all(documents, model, shared, actors=None)
    assert (again.documents, again.chunks, again.encoded, again.failed) == (24, 96, 0, [])
    engine = open_one()
    assert len(engine.ids()) == 96
    result = engine.generate(BlendPrompt("Read.", engine.document("doc-7"), "Which?"), 4)
    assert (result.report.hits, result.report.misses) == (4, 0)


@pytest.mark.full
@pytest.mark.parametrize("kills", [1, 10])
def test_killed_workers_lose_nothing(
    cluster: None, model: str, shared: dict[str, Any], open_one: Opener, kills: int
) -> None:
    import ray

    documents = documents_of(20 + 20 * kills)
    rows = ray.data.from_items(documents, override_num_blocks=len(documents) // 4)
    engine, is_over, killed = open_one(), threading.Event(), set[int]()

    def slowly(batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.5)
        return batch

    def kill() -> None:
        """Kill a worker each time that 20 documents more are there."""
        while not is_over.wait(0.05):
            if len(engine.ids()) > 4 * 20 * len(killed) + 40 and len(killed) < kills:
                for pid in set(workers(WORKER)) - killed:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
                    break

    killing = threading.Thread(target=kill)
    killing.start()
    try:
        slow = rows.map_batches(slowly, num_cpus=5)
        summary = warm_all(slow, model, shared, batch_documents=2)
    finally:
        is_over.set()
        killing.join()
    assert killed
    assert (summary.documents, summary.chunks, summary.failed) == (len(documents), 4 * len(documents), [])
    again = warm_all(documents, model, shared)
    assert (again.encoded, again.chunks) == (0, summary.chunks)
    assert len(engine.ids()) == summary.chunks


def test_a_dataset_and_its_workers(model: str, shared: dict[str, Any]) -> None:
    batch = batch_of([*documents_of(5), LONG, {"document": ""}, {"document": "d"}, {"document": "e", "text": 3}])
    first, again = (Warmer(model, None, EngineConfig(**shared))(batch) for _ in range(2))
    told = dict(zip(first["document"], first["error"], strict=True))
    assert [name for name, error in told.items() if error] == ["long", "", "d", "e"]
    assert (sum(first["encoded"]), sum(again["encoded"])) == (20, 0)
    assert first["error"] == again["error"]
    fewer = {"document": "doc-3", "chunks": documents_of(4)[3]["chunks"][:2]}
    shorter = Warmer(model, None, EngineConfig(**shared))(batch_of([fewer]))
    assert (shorter["chunks"], shorter["encoded"], shorter["error"]) == ([2], [0], [""])


def test_what_the_remote_tier_has_no_room_for_is_told(model: str, shared: dict[str, Any], redis_of_ray: Any) -> None:
    import redis

    worker = Warmer(model, None, EngineConfig(**shared))
    with redis.Redis.from_url(redis_of_ray.url()) as client:
        client.config_set("maxmemory", "1mb")
        try:
            done = worker(batch_of(documents_of(2)))
        finally:
            client.config_set("maxmemory", "0")
    assert all("remote" in error for error in done["error"])


@pytest.mark.parametrize(
    ("source", "settings", "options"),
    [
        (documents_of(1), {}, {}),
        (documents_of(1), {"remote": "memory://x"}, {"actors": 0}),
        ([{"text": "x"}], {"remote": "memory://x"}, {}),
        ([{"document": "a", "text": "x"}, {"document": "a", "text": "y"}], {"remote": "memory://x"}, {}),
    ],
)
def test_what_is_no_corpus_or_would_not_be_kept_is_refused(
    cluster: None, source: Any, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        warm(source, model="reference", config=EngineConfig(**settings), **options)


def test_a_model_that_is_not_there_is_told(cluster: None, shared: dict[str, Any], tmp_path: Path) -> None:
    import ray

    with pytest.raises(BackendError):
        warm_all(ray.data.from_items(documents_of(1)), str(tmp_path / "none"), shared)


def test_the_command_warms_a_folder(
    cluster: None, model: str, shared: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_one: Opener
) -> None:
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.md", "deep/b.txt", "c.bin", ".hidden.md"):
        (folder / name).write_text(f"The text of {name}.")
    (folder / "blank.md").write_text(" \n")
    (folder / "bad.md").write_bytes(b"\xff\xfe\xff")
    (folder / "long.md").write_text("word " * 50)
    for name, value in shared.items():
        monkeypatch.setenv(f"CACHEBLEND_{name.upper()}", value)
    command = ["warm-ray", str(folder), "--model", model, "--json", str(tmp_path / "out.json")]
    done = CliRunner().invoke(app, command)
    # All but one, which is named.
    assert done.exit_code == 1 and "bad.md is left out" in done.output
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (row["documents"], row["encoded"], row["failed"]) == (3, 3, [])
    engine = open_one()
    assert [len(engine.document(name)) for name in ("a.md", "deep/b.txt", "long.md")] == [1, 1, 1]
    (folder / "more.md").write_text("The text of more.")
    (folder / "long.md").write_text("word " * 5000)
    command += ["--chunk-tokens", "6000"]
    failed = CliRunner().invoke(app, command)
    assert failed.exit_code == 1
    assert "long.md" in failed.output
    assert CliRunner().invoke(app, ["warm-ray", str(folder / "bad.md"), "--model", model]).exit_code == 2
