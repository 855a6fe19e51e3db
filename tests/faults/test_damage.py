"""Pages that an index loses, truncations: what is damaged is a miss, never an answer."""

import random
import shutil
from pathlib import Path

import pytest

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import check_store
from tests.core.documents.naive import Library, Rows, small_model
from tests.core.documents.texts import Text
from tests.families import tiny_tokenizer, words


def damage_index(path: Path, chance: random.Random) -> None:
    """Lose a page, or all from somewhere on."""
    data = bytearray(path.read_bytes())
    page = chance.randrange(len(data) // 4096) * 4096
    if chance.random() < 0.3:
        del data[page + chance.randrange(4096) :]
    else:
        data[page : page + 4096] = bytes(4096)
    path.write_bytes(data)


@pytest.mark.parametrize(
    "count", [40, pytest.param(400, marks=[pytest.mark.full, pytest.mark.timeout(1800)])], ids=["sampled", "whole"]
)
def test_index_of_documents(tmp_path: Path, count: int) -> None:
    """Whatever is damaged, no chunk is served behind other text than its own, and what is repaired can be added again."""
    chance = random.Random(count)
    folder, model = tmp_path / "store", small_model()
    settings = engine_settings(recompute_ratio=0.0, selector="none", ram_bytes=0, self_check=False, context_tokens=20)

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
        engine._store.discard(missing.key)
        ids = engine.ids()
        keys = {record.id: record.key for record in engine.records(ids) if record is not None}
        rules = engine._assembler.rules
    shutil.copytree(folder, tmp_path / "sound")
    library = Library(rules.limit, ())
    library.add(chunks, float("inf"))
    library.add([Chunk(words(6, 50 + number), f"e-{number}", document="e") for number in range(3)], float("inf"))
    readings, rows = library.readings(0.0), Rows(model)
    refused = 0
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
                    assert rows.is_right(engine, record.key, readings[record.id]), record.id
        except StoreError:
            refused += 1
        check_store(folder, repair=True)
        assert check_store(folder).problems == []
        with opened() as engine:
            engine.add(chunks)
            for text in texts:
                for number, chunk in enumerate(text.chunks):
                    assert engine.document(text.name)[number] == chunk.id
                    [record] = engine.records([str(chunk.id)])
                    assert record is not None
                    assert rows.is_right(engine, record.key, readings[record.id]), record.id
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "sound", folder)
    assert refused < count
