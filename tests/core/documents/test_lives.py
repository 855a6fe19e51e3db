"""How long the KV of a document's chunks lives, and what becomes of it where others change the document meanwhile."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendEngine, BlendPrompt
from cacheblend_rag.store import KVStore, check_store, open_store
from tests.core.documents.test_serving import held, later_held
from tests.core.documents.texts import TOLERANCE, Text, distances
from tests.engines import MakeEngine
from tests.families import tiny_model

TEXT = Text.of("d", [8, 9, 7, 8], [3, 0, 2], 5)
MODEL = tiny_model("llama")

ENGINE = {"recompute_ratio": 0.0, "selector": "none", "self_check": False}


class Time:
    """What every store's clock shows."""

    now = 1.8e9


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def make_engine(make_engine: MakeEngine, tmp_path: Path, time: Time) -> MakeEngine:

    def make(store: KVStore | None = None, **values: Any) -> BlendEngine:
        return make_engine(store or open_store(tmp_path / "store", 0, clock=lambda: time.now), MODEL, **values)

    return make


def test_kv_lives_no_longer_than_what_it_was_encoded_behind(make_engine: MakeEngine, time: Time) -> None:
    engine = make_engine()
    engine.add([TEXT.chunk(0)])
    engine.add([TEXT.chunk(1)], ttl_s=50)
    time.now += 10
    engine.add([TEXT.chunk(2)], ttl_s=100)
    engine.add([TEXT.chunk(3)])
    time.now += 39
    assert held(engine) == [True] * 4
    time.now += 2
    # All that was encoded in the document since it has a piece that ends lives no longer than that.
    assert held(engine) == [True, False, False, False]


def test_a_miss_lives_anew(make_engine: MakeEngine, time: Time) -> None:
    engine = make_engine(ttl_s=50.0)
    engine.add(TEXT.chunks)
    time.now += 60
    engine.prefill(BlendPrompt("t5", ["d-1", "d-2"], "t6 t7"))
    engine.flush()
    assert later_held(engine) == [False, False, True, False]
    time.now += 51
    assert held(engine) == [False] * 4


def test_a_miss_that_reads_nothing_of_its_document_lives_as_its_name(make_engine: MakeEngine, time: Time) -> None:
    engine = make_engine()
    engine.add([TEXT.chunk(0)], ttl_s=20)
    [record] = engine.records(["d-0"])
    assert record is not None
    engine._store.discard(record.key)
    engine.prefill(BlendPrompt("t5", ["d-0"], "t6 t7"))
    engine.flush()
    assert engine._store.holds([record.key]) == [True]
    time.now += 21
    assert engine._store.holds([record.key]) == [False]


def test_waiting_lengthens_no_life(make_engine: MakeEngine, time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(encode_batch_tokens=1)
    engine.add([TEXT.chunk(0)], ttl_s=100)
    encode = engine._supply.encode

    def slow(*arguments: Any, **options: Any) -> Any:
        for batch in encode(*arguments, **options):
            time.now += 15
            yield batch

    monkeypatch.setattr(engine._supply, "encode", slow)
    time.now += 60
    engine.add([TEXT.chunk(1)], background=True)
    engine.flush()
    assert held(engine) == [True, True]
    time.now += 11
    assert held(engine) == [False, False]
    # What has ended before it could be stored is not stored.
    engine.add([TEXT.chunk(0)], ttl_s=20)
    engine.add([TEXT.chunk(2)], ttl_s=10, background=True)
    engine.flush()
    assert held(engine)[2] is False


def test_changes_elsewhere_leave_none(make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, other = make_engine(), make_engine()
    engine.add(TEXT.chunks[:2])
    encode = engine._supply.encode

    def disturbed(*arguments: Any, **options: Any) -> Any:
        for batch in encode(*arguments, **options):
            other.delete(["d-0"])
            yield batch

    monkeypatch.setattr(engine._supply, "encode", disturbed)
    engine.add(TEXT.chunks[2:])
    assert engine.document("d") == ["d-1", "d-2", "d-3"]
    assert_none_has_seen(engine, "d-0")
    assert held(engine) == [True] * 3
    monkeypatch.undo()
    engine.add(TEXT.chunks[1:])
    assert later_held(engine) == [True] * 3
    assert check_store(tmp_path / "store").is_clean


def assert_none_has_seen(engine: BlendEngine, id: str) -> None:
    """Nothing stored is read behind a chunk, and all that is stored is what its name says."""
    records = [record for record in engine.records(engine.ids()) if record is not None]
    laters = [record.later for record in records if record.later is not None]
    assert all(id not in [seen for seen, _ in later.seen] for later in laters)
    assert engine._store.stats().entries == len(
        {key for each in records for key in each.keys if engine._store.holds([key])[0]}
    )
    for record in records:
        if record.later is not None:
            assert max(distances(engine, record.id), default=0) < TOLERANCE


def test_what_moves_to_another_document_is_seen_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(TEXT.chunks)
    engine.add([replace(TEXT.chunk(1), document="other")])
    assert_none_has_seen(engine, "d-1")
    assert engine.document("other") == ["d-1"]


@pytest.mark.parametrize("dies", [False, True])
def test_a_replacement(make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    """Whoever looks meanwhile finds it as it was, and so does everybody where the replacement ends half-way."""
    engine, other = make_engine(), make_engine()
    engine.add(TEXT.chunks)
    old, new = [str(chunk.id) for chunk in TEXT.chunks], Text.of("d", [6, 9, 5], [0, 2], 7)
    chunks = [replace(chunk, id=f"new-{number}") for number, chunk in enumerate(new.chunks)]
    encode, seen = engine._supply.encode, []

    def watched(*arguments: Any, **options: Any) -> Any:
        for batch in encode(*arguments, **options):
            seen.append(other.document("d"))
            if dies:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(engine._supply, "encode", watched)
    if dies:
        with pytest.raises(KeyboardInterrupt):
            engine.add(chunks, whole=True)
        assert other.document("d") == old
        assert all(max(distances(other, id)) < TOLERANCE for id in old)
        return
    result = engine.add(chunks, whole=True)
    names = [chunk.id for chunk in chunks]
    assert result.named == 3 and seen and all(found == old for found in seen)
    assert sorted(other.ids()) == names
    assert all(max(distances(other, str(chunk.id))) < TOLERANCE for chunk in chunks)
    engine.add(chunks[:2], whole=True)
    assert other.document("d") == names[:2]
    assert_none_has_seen(other, "new-2")
    assert engine.add(chunks[:2], whole=True).unchanged == 2
    assert check_store(tmp_path / "store").is_clean


def test_a_name_that_leaves_is_not_stored(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, other = make_engine(), make_engine()
    engine.add(TEXT.chunks)
    [record] = engine.records(["d-2"])
    assert record is not None and record.later is not None
    engine._store.discard(record.later.key)
    lookup = engine._store.lookup

    def overtaken(*arguments: Any) -> Any:
        found = lookup(*arguments)
        other.delete(["d-2"])
        return found

    monkeypatch.setattr(engine._store, "lookup", overtaken)
    engine.prefill(BlendPrompt("t5", ["d-1", "d-2"], "t6 t7"))
    engine.flush()
    assert engine._store.holds(list(record.keys)) == [False, False]
