"""Damage, kills and ingestions that end half-way: nothing wrong is served, and nothing is lost or left."""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import StoreError
from tests.core.documents.naive import Library, Rows, small_model
from tests.core.documents.texts import Text
from tests.engines import evict
from tests.families import tiny_tokenizer, words
from tests.faults import documents, ingestions
from tests.limits import one_thread as one_thread
from tests.store.kit import start

WHOLE = [pytest.mark.full, pytest.mark.timeout(1800)]

TEXTS = [Text.of(f"d{number}", [5, 6, 4, 7], [2, 0, 1], number) for number in range(3)]
CHUNKS = [
    *(chunk for text in TEXTS for chunk in text.chunks),
    *(Chunk(words(6, 50 + number), f"e-{number}", document="e") for number in range(3)),
    Chunk("t5 t6", "alone"),
]


def opened(folder: Path) -> BlendEngine:
    settings = engine_settings(recompute_ratio=0.0, ram_bytes=0, self_check=False)
    return BlendEngine(small_model(), tiny_tokenizer(), **settings, store=folder)


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=WHOLE)], ids=["sampled", "whole"])
def test_a_damaged_index_is_refused_or_right(tmp_path: Path, count: int) -> None:
    """No chunk is served behind other text than its own."""
    chance, refused, source = random.Random(count), 0, tmp_path / "source"
    library, rows = Library(()), Rows(small_model())
    library.add(CHUNKS)
    readings = library.readings()
    with opened(source) as engine:
        engine.add(CHUNKS)
        keys = {record.id: record.key for record in engine.records(engine.ids()) if record is not None}
        # One is always missing, and has to be encoded.
        evict(engine, "d1-2")
        # Pages of the index that nothing asks for.
        engine.add([Chunk(words(8, number), f"other {number}") for number in range(100)])
    for number in range(count):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        with open(folder / "index.sqlite", "r+b") as index:
            page = index.seek(chance.randrange(index.seek(0, os.SEEK_END) // 4096) * 4096)
            if chance.random() < 0.3:
                index.truncate(page + chance.randrange(4096))
            else:
                index.write(bytes(4096))
        try:
            with opened(folder) as engine:
                known = [record.id for record in engine.records(list(keys)) if record is not None]
                if known:
                    engine.prefill(BlendPrompt("t5 t6", known, "t7 t8"))
                    engine.flush()
                assert all(record.key == keys[record.id] for record in engine.records(known) if record is not None)
                engine.add(CHUNKS)
                for text in TEXTS:
                    assert engine.document(text.name)[: len(text.cuts)] == [chunk.id for chunk in text.chunks]
                for record in engine.records(list(keys)):
                    assert record is not None
                    own = readings[record.id]
                    later = own if record.later is None else replace(own, context=record.later.behind)
                    pairs = zip(record.keys, (own, later), strict=False)
                    assert all(rows.is_right(engine, key, reading) for key, reading in pairs)
        except StoreError:
            refused += 1
        shutil.rmtree(folder)
    assert refused < count


def nothing_is_wrong(run: Callable[..., list[str]], *arguments: object) -> None:
    """See that a command finds nothing wrong, in a process that has no threads, since the command forks."""
    process = start(_run, run, *arguments)
    process.join()
    assert process.exitcode == 0


def _run(run: Callable[..., list[str]], *arguments: object) -> None:
    torch.set_num_threads(1)
    found = run(*arguments)
    assert found == [], found


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=WHOLE)])
@pytest.mark.parametrize("disk_bytes", [None, 12_000], ids=["unbounded", "evicting"])
def test_documents_are_not_stale_after_kills(tmp_path: Path, kills: int, disk_bytes: int | None) -> None:
    nothing_is_wrong(documents.run, tmp_path / "run", kills, disk_bytes)
    # Something was there to go stale.
    looked = [line for line in (tmp_path / "run.log").read_text().splitlines() if line.startswith("looked")]
    assert any(line != "looked 0" for line in looked)


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=WHOLE)])
def test_nothing_is_left_and_nothing_lost_after_an_ingestion_is_killed(tmp_path: Path, kills: int) -> None:
    nothing_is_wrong(ingestions.run, tmp_path / "run", kills)
