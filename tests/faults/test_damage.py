"""Damage, kills and ingestions that end half-way: what is damaged is a miss, never an answer, and nothing is lost or left."""

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
from cacheblend_rag.store import NodeRecord
from tests.core.documents.naive import Library, Rows, small_model
from tests.core.documents.texts import Text
from tests.families import tiny_tokenizer, words
from tests.faults import damage, documents, ingestions
from tests.limits import one_thread as one_thread
from tests.store.kit import start

WHOLE = [pytest.mark.full, pytest.mark.timeout(1800)]


def damage_index(path: Path, chance: random.Random) -> None:
    """Lose a page, or all from somewhere on."""
    data = bytearray(path.read_bytes())
    page = chance.randrange(len(data) // 4096) * 4096
    if chance.random() < 0.3:
        del data[page + chance.randrange(4096) :]
    else:
        data[page : page + 4096] = bytes(4096)
    path.write_bytes(data)


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=WHOLE)], ids=["sampled", "whole"])
def test_index_of_documents(tmp_path: Path, count: int) -> None:
    """Whatever is damaged, no chunk is served behind other text than its own: the index is refused, or right."""
    chance = random.Random(count)
    folder, model = tmp_path / "store", small_model()
    settings = engine_settings(recompute_ratio=0.0, selector="none", ram_bytes=0, self_check=False)

    def opened() -> BlendEngine:
        return BlendEngine(model, tiny_tokenizer(), **settings, store=folder)

    texts = [Text.of(f"d{number}", [5, 6, 4, 7], [2, 0, 1], number) for number in range(3)]
    chunks = [chunk for text in texts for chunk in text.chunks] + [Chunk("t5 t6", "alone")]
    with opened() as engine:
        engine.add(chunks)
        engine.add([Chunk(words(6, 50 + number), f"e-{number}", document="e") for number in range(3)])
        # One is always missing, and has to be encoded.
        [missing] = engine.records(["d1-2"])
        assert missing is not None
        engine._store.discard(missing.keys[-1])
        ids = engine.ids()
        keys = {record.id: record.key for record in engine.records(ids) if record is not None}
    shutil.copytree(folder, tmp_path / "sound")
    library = Library(())
    library.add(chunks, float("inf"))
    library.add([Chunk(words(6, 50 + number), f"e-{number}", document="e") for number in range(3)], float("inf"))
    readings, rows = library.readings(0.0), Rows(model)
    refused = 0

    def is_right(engine: BlendEngine, record: NodeRecord) -> bool:
        own = readings[record.id]
        later = own if record.later is None else replace(own, context=record.later.behind)
        return all(rows.is_right(engine, key, each) for key, each in zip(record.keys, (own, later), strict=False))

    for _ in range(count):
        damage_index(folder / "index.sqlite", chance)
        try:
            with opened() as engine:
                known = [record.id for record in engine.records(ids) if record is not None]
                if known:
                    engine.prefill(BlendPrompt("t5 t6", known, "t7 t8"))
                    engine.flush()
                for record in filter(None, engine.records(known)):
                    assert record.key == keys[record.id]
                    assert is_right(engine, record)
                engine.add(chunks)
                for text in texts:
                    for number, chunk in enumerate(text.chunks):
                        assert engine.document(text.name)[number] == chunk.id
                        [record] = engine.records([str(chunk.id)])
                        assert record is not None
                        assert is_right(engine, record)
        except StoreError:
            refused += 1
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "sound", folder)
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


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=WHOLE)])
def test_damaged_stores_heal(count: int) -> None:
    assert damage.run(count) == []


@pytest.mark.parametrize(
    ("framework", "kills"),
    [("llama_index", 1), *(pytest.param(name, 50, marks=WHOLE) for name in ("llama_index", "langchain"))],
)
def test_nothing_is_left_and_nothing_lost_after_an_ingestion_is_killed(
    tmp_path: Path, framework: str, kills: int
) -> None:
    nothing_is_wrong(ingestions.run, tmp_path / "run", framework, kills)
