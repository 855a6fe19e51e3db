"""Answers under stress: the command in short, and what it does not look at."""

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import StoreError, StoreFormatError
from cacheblend_rag.store import open_store
from cacheblend_rag.store.database import _disconnect
from langchain_cacheblend import BlendLLM
from tests.families import tiny_model, tiny_tokenizer, words
from tests.faults.stress import run
from tests.store.kit import fill, small_disk
from tests.store.remote.conftest import needs_redis

CHUNKS = [Chunk(words(12, number), f"n{number}", document="d") for number in range(3)]
PROMPT = BlendPrompt(words(3, 10), CHUNKS, words(5, 11))


@pytest.mark.parametrize("seconds", [1.2, pytest.param(20.0, marks=[pytest.mark.full, pytest.mark.timeout(300)])])
@pytest.mark.parametrize("fault", ["full", "read-only", "lock", "stopped", "killed"])
def test_every_question_is_answered(fault: str, seconds: float) -> None:
    if fault in ("stopped", "killed"):
        needs_redis()
    outcome = run(fault, seconds)
    assert outcome.flaws == [], outcome


def open_engine(folder: Path) -> BlendEngine:
    settings = engine_settings(recompute_ratio=0.0, selector="none", self_check=False, disk_codec="native")
    return BlendEngine(tiny_model("llama"), tiny_tokenizer(), **settings, store=folder)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    with open_engine(tmp_path / "store") as engine:
        engine.add(CHUNKS)
        yield engine


@contextmanager
def unreadable(engine: BlendEngine, folder: Path) -> Iterator[None]:
    """Keep even readers out of the index."""
    with closing(sqlite3.connect(folder / "index.sqlite", isolation_level=None)) as other:
        # It is opened again when it is next needed.
        _disconnect(engine._store._index._connections)
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        other.execute("INSERT INTO tenants VALUES ('x', 0, 0, 0)")
        yield
        other.execute("ROLLBACK")


def test_names_that_cannot_be_read(engine: BlendEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    undisturbed = engine.prefill(PROMPT).report
    assert undisturbed.hits == 3
    with unreadable(engine, tmp_path / "store"):
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                report = engine.prefill(PROMPT).report
                # KV that may remember its document is not taken for that of the chunk alone.
                assert {chunk.reason for chunk in report.chunks if not chunk.hit} == {
                    "the ids in the store cannot be read now, so it is computed like text"
                }
                assert report.overhead_s + report.load_s < 5.0
            assert engine.generate(PROMPT, 2, do_sample=False).report.fallback_reason is not None
            with pytest.raises(StoreError, match="chunk 'n1' cannot be looked up"):
                engine.prefill(BlendPrompt("t1", ["n1"], "t2"))
            with pytest.raises(StoreError, match="chunk 'n1' cannot be looked up"):
                engine.prefill(BlendPrompt("t1", ["n1"], "t2", skip_unknown=True))
            engine.prefetch(["n1"]).wait()
        assert len([message for message in caplog.messages if "cannot be used now" in message]) == 1
        figure = engine.metrics.registry.get_sample_value("cacheblend_store_failures_total")
        assert figure is not None and figure >= 6
    assert engine.prefill(PROMPT).report.hits == 3


def test_which_chunks_are_in_a_prompt_cannot_be_read(
    engine: BlendEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = BlendLLM(engine=engine, max_tokens=2)
    question = f"{CHUNKS[0].text} {words(5, 11)}"
    with unreadable(engine, tmp_path / "store"), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert llm.invoke(question)
    assert len([message for message in caplog.messages if "the list of stored chunks cannot be read" in message]) == 1


def test_a_store_that_cannot_be_opened_is_replaced_by_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", 2**20) as disk:
        fill(disk)
        with caplog.at_level(logging.WARNING), open_engine(disk / "store") as engine:
            assert engine.store.path is None
            engine.add(CHUNKS)
            assert engine.prefill(PROMPT).report.hits == 3
        [message] = caplog.messages
        assert "kept in the memory of this process" in message and "no space left" in message


@pytest.mark.parametrize("mistake", ["foreign", "file", "version"])
def test_another_folder_was_meant(tmp_path: Path, mistake: str) -> None:
    folder = tmp_path / "store"
    if mistake == "file":
        folder.touch()
    elif mistake == "foreign":
        folder.mkdir()
        (folder / "letter.txt").touch()
    else:
        open_store(folder, 0).close()
        (folder / "store.json").write_text('{"format": "cacheblend-rag store", "version": 99}')
    with pytest.raises(StoreFormatError):
        open_engine(folder)


def test_a_full_disk_is_opened(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2**20) as disk:
        with open_engine(disk / "store") as engine:
            engine.add(CHUNKS)
        fill(disk)
        with open_engine(disk / "store") as engine:
            assert engine.prefill(PROMPT).report.hits == 3
