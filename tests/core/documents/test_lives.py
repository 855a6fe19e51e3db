"""How long the KV of a document's chunks lives, and what becomes of it where others change the document meanwhile."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendEngine, BlendPrompt
from cacheblend_rag.store import KVStore, check_store, open_store
from tests.core.documents.test_serving import held
from tests.core.documents.texts import TOLERANCE, Text, distance
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
    assert held(engine) == [True, False, False, False]


def test_what_is_encoded_late_lives_as_long_as_a_miss(make_engine: MakeEngine, time: Time) -> None:
    engine = make_engine(ttl_s=50.0, miss_tokens=0)
    engine.add(TEXT.chunks)
    time.now += 60
    engine.prefill(BlendPrompt("t5", ["d-1", "d-2"], "t6 t7"))
    engine.flush()
    assert held(engine) == [False, True, True, False]
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
            time.now += 30
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
    assert held(engine) == [False] * 3
    assert engine._store.stats().entries == 0
    monkeypatch.undo()
    engine.add(TEXT.chunks[1:])
    for number in (1, 2, 3):
        assert distance(engine, f"d-{number}", TEXT.context(number, (1, 2, 3))) < TOLERANCE
    assert check_store(tmp_path / "store").is_clean


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
        for number in range(len(old)):
            assert distance(other, f"d-{number}", TEXT.context(number, range(len(old)))) < TOLERANCE
        return
    result = engine.add(chunks, whole=True)
    names = [chunk.id for chunk in chunks]
    assert (result.named, seen) == (3, [old])
    assert sorted(other.ids()) == names
    for number, chunk in enumerate(chunks):
        assert distance(other, str(chunk.id), new.context(number, range(3))) < TOLERANCE
    assert engine.add(chunks[:2], whole=True).encoded == 0
    assert other.document("d") == names[:2]
    assert engine.add(chunks[:2], whole=True).unchanged == 2
    assert check_store(tmp_path / "store").is_clean


def test_a_name_that_leaves_is_not_encoded_alone(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, other = make_engine(), make_engine()
    engine.add(TEXT.chunks)
    [record] = engine.records(["d-2"])
    assert record is not None
    engine._store.discard(record.key)
    lookup = engine._store.lookup

    def overtaken(*arguments: Any) -> Any:
        found = lookup(*arguments)
        other.delete(["d-2"])
        return found

    monkeypatch.setattr(engine._store, "lookup", overtaken)
    report = engine.prefill(BlendPrompt("t5", ["d-1", "d-2"], "t6 t7")).report
    assert [chunk.reason for chunk in report.chunks] == [
        None,
        "its KV was evicted: dropped for room, or expired; its document was changed just now, so "
        "it is computed like text",
    ]
    engine.flush()
    assert engine._store.holds([record.key]) == [False]


@pytest.mark.parametrize("disk", [True, False])
def test_a_pin_follows_the_name_to_its_new_key(make_engine: MakeEngine, tmp_path: Path, disk: bool) -> None:
    store = open_store(tmp_path / "pins", 10**5, 10**5) if disk else open_store(None, 10**5)
    engine = make_engine(store)
    engine.add([TEXT.chunk(0), TEXT.chunk(2)])
    engine.pin(["d-2"])
    engine.add([TEXT.chunk(1)])
    many = [Text.of(f"e{number}", [9, 9], [0], number) for number in range(20)]
    for text in many:
        engine.add(text.chunks)
    assert engine.store.stats().evictions
    assert distance(engine, "d-2", TEXT.context(2, range(3))) < TOLERANCE
    # The old key's KV is gone, and its room is given back.
    assert engine._store.stats().pinned_bytes > 0
    engine.unpin(["d-2"])
    assert engine._store.stats().pinned_bytes == 0
