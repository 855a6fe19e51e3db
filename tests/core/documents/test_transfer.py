"""A document in an exported file comes whole, and what comes in parts is read anew."""

import json
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import check_store, export_store, import_store, open_store
from tests.core.documents.naive import Library, Rows
from tests.core.documents.texts import TOLERANCE, Text, distance
from tests.engines import MakeEngine
from tests.families import tiny_model, words
from tests.store.kit import files_of
from tests.store.test_transfer import forge, members

TEXT = Text.of("d", [8, 9, 7, 8], [3, 0, 2], 5)
MODEL = tiny_model("llama")

ENGINE = {"recompute_ratio": 0.0, "selector": "none", "self_check": False}


@pytest.fixture
def open_engine(make_engine: MakeEngine, tmp_path: Path) -> MakeEngine:
    return lambda name, **values: make_engine(open_store(tmp_path / name, 0), MODEL, **values)


def move(tmp_path: Path, source: str, target: str, ids: list[str] | None = None) -> None:
    export_store(tmp_path / source, tmp_path / "file", ids=ids)
    import_store(tmp_path / target, tmp_path / "file")
    assert check_store(tmp_path / target).problems == []


def held(engine: BlendEngine) -> list[bool]:
    keys = [record.key for record in engine.records(engine.document("d")) if record is not None]
    return engine._store.holds(keys)


def assert_right(engine: BlendEngine, there: list[int], separator: tuple[int, ...] = ()) -> None:
    """Assert that of a document these chunks are there, and have their KV or get it."""
    assert engine.document("d") == [f"d-{number}" for number in there]
    rows = Rows(MODEL)
    library = Library(engine._assembler.rules.limit, separator)
    library.add([TEXT.chunk(number) for number in there], float("inf"))
    for id, reading in library.readings(0.0).items():
        [record] = engine.records([id])
        assert record is not None
        assert rows.is_right(engine, record.key, reading)
    engine.add([TEXT.chunk(number) for number in there])
    for number in there:
        assert distance(engine, f"d-{number}", TEXT.context(number, there, separator), separator) < TOLERANCE


@pytest.mark.parametrize("separator", ["", "t3 t4"])
def test_a_document_comes_whole(tmp_path: Path, open_engine: MakeEngine, separator: str) -> None:
    engine = open_engine("s", separator=separator)
    engine.add([TEXT.chunk(0), TEXT.chunk(1), TEXT.chunk(3)])
    [record] = engine.records(["d-1"])
    assert record is not None
    engine._store.discard(record.key)
    move(tmp_path, "s", "t")
    there = open_engine("t", separator=separator)
    assert there.records(["d-0", "d-1", "d-3"]) == engine.records(["d-0", "d-1", "d-3"])
    assert held(there) == [True, False, True]
    # A miss is encoded in its context, and what is added finds its place.
    result = there.add([TEXT.chunk(2)])
    assert result.encoded == 2
    assert_right(there, [0, 1, 2, 3], there._assembler.rules.separator)


def test_without_places_the_order_stays(tmp_path: Path, open_engine: MakeEngine) -> None:
    engine = open_engine("s")
    chunks = [Chunk(words(6, number), f"c{number}", document="d") for number in range(4)]
    engine.add(chunks)
    # This one is at the end now, though its name is the oldest.
    engine.add([Chunk(chunks[0].text, "c0", document="d", previous="c3"), Chunk("t5 t6", "alone")])
    engine.add([Chunk(words(3, 9), "c9", document="d", previous="c1")])
    move(tmp_path, "s", "t")
    there = open_engine("t")
    assert there.document("d") == engine.document("d") == ["c1", "c9", "c2", "c3", "c0"]
    assert held(there) == [True] * 5
    for each in (engine, there):
        each.delete(["c2"])
    assert there.document("d") == engine.document("d") == ["c1", "c9", "c3", "c0"]


def test_a_part_of_a_document(tmp_path: Path, open_engine: MakeEngine) -> None:
    engine = open_engine("s")
    engine.add([*TEXT.chunks, Chunk("t5 t6", "alone")])
    report = export_store(tmp_path / "s", tmp_path / "file", ids=["d-0", "d-2", "d-3", "alone"])
    # What remembers the chunk that is left out stays here.
    assert (report.entries, report.names) == (2, 4)
    move(tmp_path, "s", "t", ["d-0", "d-2", "d-3", "alone"])
    assert_right(open_engine("t"), [0, 2, 3])


def test_into_a_document_that_is_there(tmp_path: Path, open_engine: MakeEngine) -> None:
    open_engine("s").add([TEXT.chunk(0), TEXT.chunk(1), TEXT.chunk(3)])
    target = open_engine("t")
    target.add([TEXT.chunk(0), TEXT.chunk(2)])
    move(tmp_path, "s", "t")
    # Of what came, only what stands behind the same has its KV; nothing is left of the rest.
    assert held(target) == [True, True, False, False]
    assert len(files_of(tmp_path / "t")) == 2
    assert_right(target, [0, 1, 2, 3])
    assert len(files_of(tmp_path / "t")) == 4


def test_what_is_there_with_another_text_stays(tmp_path: Path, open_engine: MakeEngine) -> None:
    open_engine("s").add(TEXT.chunks)
    target = open_engine("t")
    other = Chunk(words(5, 77), "d-0", document="d", start=0)
    target.add([other])
    move(tmp_path, "s", "t")
    assert target.document("d") == ["d-0", "d-1", "d-2", "d-3"]
    assert held(target) == [True, False, False, False]
    assert len(files_of(tmp_path / "t")) == 1
    library = Library(None, ())
    library.add([other, *TEXT.chunks[1:]], float("inf"))
    target.add([other, *TEXT.chunks[1:]])
    for id, reading in library.readings(0.0).items():
        assert distance(target, id, reading.context) < TOLERANCE


def test_lives_come_along_and_end_with_those_in_front(tmp_path: Path, open_engine: MakeEngine) -> None:
    engine = open_engine("s")
    engine.add([TEXT.chunk(0)])
    engine.add([TEXT.chunk(1)])
    engine.add([TEXT.chunk(2)], ttl_s=1000)
    # Here the first lives for a while only, and so does what comes to stand behind it.
    open_engine("t").add([TEXT.chunk(0)], ttl_s=100)
    for name, ends in (("t", [100, 100, 100]), ("u", [None, None, 1000])):
        move(tmp_path, "s", name)
        target = open_engine(name)
        keys = [record.key for record in target.records(["d-0", "d-1", "d-2"]) if record is not None]
        lives = target._store.lifetimes(keys)
        assert [life is not None for life in lives] == [True] * 3
        for life, end in zip(lives, ends, strict=True):
            assert life is not None
            assert life <= (float("inf") if end is None else end + 1)
            assert life > 90
        target.add([TEXT.chunk(3)])
        [record] = target.records(["d-3"])
        assert record is not None
        [life] = target._store.lifetimes([record.key])
        assert life is not None
        assert life <= min(end for end in ends if end is not None) + 1


@pytest.mark.parametrize(
    "place", [[], ["d", "x", None, 1, "", [], None, None], ["d", 0, None, "y", "", [1], None, None], [None] * 8, "d"]
)
def test_a_place_that_is_none(tmp_path: Path, open_engine: MakeEngine, place: Any) -> None:
    open_engine("s").add(TEXT.chunks)
    export_store(tmp_path / "s", tmp_path / "file")
    contents = []
    for name, data in members(tmp_path / "file"):
        if name.startswith("names/"):
            data = json.dumps([[*row[:7], place] for row in json.loads(data)]).encode()
        contents.append((name, data))
    forge(tmp_path / "forged", contents)
    with pytest.raises(StoreError, match="is damaged"):
        import_store(tmp_path / "t", tmp_path / "forged")
    assert not (tmp_path / "t").exists()
