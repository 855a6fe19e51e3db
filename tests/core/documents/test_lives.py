"""What becomes of the KV of a document's chunks where others change the document meanwhile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.store import check_store
from tests.core.documents.texts import TOLERANCE, Text, distances
from tests.engines import MakeEngine
from tests.families import tiny_model, words

TEXT = Text.of("d", [8, 9, 7, 8], [3, 0, 2], 5)
IDS = [str(chunk.id) for chunk in TEXT.chunks]
ENGINE = {"recompute_ratio": 0.0, "self_check": False}
MODEL = tiny_model("llama")


@contextmanager
def at_each_batch(engine: BlendEngine, deed: Callable[[], object]) -> Iterator[None]:
    with engine.model.get_decoder().register_forward_pre_hook(lambda *_: deed() and None):
        yield


@pytest.mark.parametrize("dies", [False, True])
def test_a_replacement(make_engine: MakeEngine, tmp_path: Path, dies: bool) -> None:
    """Whoever looks meanwhile finds the new text, as everybody does where its encoding ends half-way; the rest are misses."""
    engine, other = (make_engine(tmp_path / "store", MODEL, encode_batch_tokens=1) for _ in range(2))
    engine.add(TEXT.chunks)
    new = Text.of("d", [6, 9, 5], [0, 2], 7)
    chunks = [replace(chunk, id=f"new-{number}") for number, chunk in enumerate(new.chunks)]
    names, seen = [str(chunk.id) for chunk in chunks], []

    def watch() -> None:
        seen.append(other.document("d"))
        if dies and len(seen) == 3:
            raise KeyboardInterrupt

    with at_each_batch(engine, watch):
        if dies:
            with pytest.raises(KeyboardInterrupt):
                engine.add(chunks, whole=True)
        else:
            assert engine.add(chunks, whole=True).named == 3
    assert seen and all(found == names for found in seen)
    assert (sorted(other.ids()), other.document("d")) == (names, names)
    found = [distances(other, id) for id in names]
    assert all(each < TOLERANCE for kv in found for each in kv)
    assert all(len(kv) == 2 for kv in found) is not dies
    if dies:
        assert engine.add(chunks, whole=True).encoded
        assert all(len(distances(other, id)) == 2 for id in names)
    else:
        engine.add(chunks[:2], whole=True)
        assert other.document("d") == names[:2]
        records = [record for record in other.records(names[:2]) if record is not None]
        assert all("new-2" not in dict(record.later.seen) for record in records if record.later is not None)
        assert engine.add(chunks[:2], whole=True).unchanged == 2
        assert check_store(tmp_path / "store").is_clean


def test_what_has_seen_a_deleted_chunk_is_not_shared_with_later_prompts(make_engine: MakeEngine) -> None:
    engine = make_engine(model=MODEL, prefix_bytes=10**7)
    engine.add([*TEXT.chunks, Chunk(words(6, 9), "alone")])
    chunks = ["alone", "d-0", "d-3", "d-2"]
    ahead, rows = 1 + 2, [6, 8, 8, 7]

    def shared(question: str) -> int:
        prompt = BlendPrompt(segments=["t5 t6", *map(ChunkRef, chunks), "t7 t8", question])
        return engine.generate(prompt, 1).report.prefix_tokens

    assert shared("t9 t10") == 0
    assert shared("t11") >= ahead + sum(rows)
    seers = {r.id for r in engine.records(IDS) if r is not None and r.later is not None and "d-1" in dict(r.later.seen)}
    first = next(place for place, id in enumerate(chunks) if id in seers)
    engine.delete(["d-1"])
    assert shared("t11") == ahead + sum(rows[:first])
    assert shared("t12") >= ahead + sum(rows)
