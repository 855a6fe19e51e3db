"""A disk that fills up: a real one, a small file system in memory."""

import logging
import resource
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import check_store, collect_garbage
from tests.families import tiny_model, tiny_tokenizer, words
from tests.store.kit import fill, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a file system of 3 MB."""
    with small_disk(tmp_path / "disk", 3 * 2**20) as folder:
        yield folder


@pytest.fixture
def engine(disk: Path) -> Iterator[BlendEngine]:
    """An engine whose budget is the whole disk."""
    with engine_on(disk, disk_bytes=10**9) as engine:
        yield engine


@contextmanager
def engine_on(disk: Path, **changes: int) -> Iterator[BlendEngine]:
    settings = engine_settings(recompute_ratio=0.3, ram_bytes=0, encode_batch_tokens=64, **changes)
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), **settings, store=disk / "store") as engine:
        yield engine
    assert check_store(disk / "store").problems == []


def chunk(number: int) -> Chunk:
    return Chunk(id=str(number), text=words(60, number))


def test_what_was_used_last_stays(disk: Path, engine: BlendEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine.add([chunk(number) for number in range(4)])
    prompt = BlendPrompt(words(3, 10_000), ["0", "1", "2", "3"], words(5, 10_001))
    undisturbed = engine.prefill(prompt)
    with caplog.at_level(logging.WARNING):
        assert engine.add([chunk(number) for number in range(4, 150)]).encoded == 146
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "is full" in caplog.text
    stats = engine.store.stats()
    assert stats.nodes == 150 and 10 < stats.entries == 2 * 150 - stats.evictions
    held = engine.store.holds(engine.ids())
    assert held[-1]
    again = engine.prefill(prompt)
    torch.testing.assert_close(again.logits, undisturbed.logits, atol=1e-4, rtol=0)
    engine.flush()
    # Nothing was lost but KV, which is there again.
    assert engine.prefill(prompt).report.hits == 4
    assert engine.delete(engine.ids()) == 150
    assert not list((disk / "store" / "kv").glob("*/*"))


def test_by_default_half_of_the_disk_stays_free(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    free_bytes = shutil.disk_usage(disk).free
    with caplog.at_level(logging.WARNING), engine_on(disk) as engine:
        assert engine.add([chunk(number) for number in range(80)]).encoded == 80
        held = engine.store.stats()
        assert held.disk_bytes < free_bytes / 2 < 1.4 * held.disk_bytes
        assert (held.nodes, held.entries) == (80, 160 - held.evictions)
        there = dict(zip(engine.store.holds(engine.ids()), engine.ids(), strict=True))
        prompt = BlendPrompt(words(3, 10_000), [there[False], there[True]], words(5, 10_001))
        assert [chunk.hit for chunk in engine.prefill(prompt).report.chunks] == [False, True]
        engine.flush()
    [warning] = caplog.messages
    assert "has reached its budget" in warning and "to change the budget" in warning
    # What is held stays, whoever fills the disk, and makes room for what is new.
    other = fill(disk)
    with engine_on(disk) as engine:
        assert engine.store.stats().entries == held.entries
        assert engine.prefill(prompt).report.hits == 2
        engine.add([chunk(150)])
        assert engine.contains("150") and engine.store.stats().entries <= held.entries
        other.unlink()
        engine.add([chunk(number) for number in range(151, 160)])
        assert engine.store.stats().entries > held.entries - 4


def test_what_no_name_leads_to_goes_first(disk: Path, engine: BlendEngine) -> None:
    named = [chunk(number) for number in range(4)]
    engine.add(named)
    # As an ingestion that was killed hours ago leaves them, used more recently than what is named.
    engine.add([Chunk(words(60, number)) for number in range(4, 22)])
    with closing(sqlite3.connect(disk / "store" / "index.sqlite", isolation_level=None)) as index:
        index.execute("UPDATE entries SET added_at = added_at - 7200 WHERE NOT named")
    engine.add([chunk(number) for number in range(60, 68)])
    assert engine.store.stats().evictions > 0
    assert engine.store.holds(engine.ids()) == [True] * 12


def test_another_program_fills_the_disk(disk: Path, engine: BlendEngine) -> None:
    engine.add([chunk(number) for number in range(20)])
    fill(disk)
    assert engine.add([chunk(20)]).encoded == 1
    assert engine.prefill(BlendPrompt(words(3, 1), [chunk(20), chunk(21)], words(5, 2))).report.hits == 1
    engine.flush()
    assert engine.contains("21")
    fill(disk)
    assert engine.delete(["20"]) == 1
    engine._store.discard(engine.records(["19"])[0].key)  # type: ignore[union-attr]
    fill(disk)
    report = collect_garbage(disk / "store", 0.0, lambda: time.time() + 10**6)
    assert report.unnamed == 0
    assert engine.delete(engine.ids()) == 21


def test_garbage_is_collected_on_a_full_disk(disk: Path, engine: BlendEngine) -> None:
    engine.add([Chunk(words(60, number)) for number in range(8)])
    fill(disk)
    # On so small a disk one may have gone for room, or go for the room that collecting takes.
    held = len(list((disk / "store" / "kv").glob("*/*")))
    assert held > 1 and collect_garbage(disk / "store", 0.0).unnamed in (held - 1, held)
    assert not list((disk / "store" / "kv").glob("*/*"))


def test_a_file_that_may_not_be_so_large_costs_no_other(disk: Path, engine: BlendEngine) -> None:
    engine.add([chunk(number) for number in range(8)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(StoreError):
            engine.add([chunk(8)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert engine.store.stats().evictions == 0
