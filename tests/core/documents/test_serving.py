"""All that is done with chunks is done with both KVs of the chunks of documents."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.store import check_store
from tests.core.documents.texts import TOLERANCE, Text, distances
from tests.engines import MakeEngine, evict
from tests.families import tiny_model, words
from tests.store.kit import files_of

TEXT = Text.of("d", [8, 9, 7, 8], [3, 0, 2], 5)
MODEL = tiny_model("llama")
IDS = [str(chunk.id) for chunk in TEXT.chunks]

ENGINE = {"recompute_ratio": 0.0, "selector": "none", "self_check": False, "ram_bytes": 0}


@pytest.fixture
def open_engine(make_engine: MakeEngine, tmp_path: Path) -> MakeEngine:
    return lambda name="store", **values: make_engine(tmp_path / name, MODEL, **values)


def held(engine: BlendEngine) -> list[bool]:
    """Whether the KV right behind the preamble is stored, of each chunk that is there."""
    return engine._store.holds([record.key for record in engine.records(IDS) if record is not None])


def later_held(engine: BlendEngine) -> list[bool]:
    """Whether the KV behind other chunks is chosen and stored."""
    records = [record for record in engine.records(IDS) if record is not None]
    return [each.later is not None and engine._store.holds([each.later.key])[0] for each in records]


def assert_right(engine: BlendEngine, *ids: str) -> None:
    """All that is stored of chunks is right, and nothing is missing."""
    for id in ids:
        worst = distances(engine, id)
        assert len(worst) == 2 and max(worst) < TOLERANCE


def ask(engine: BlendEngine, *ids: str, **values: Any) -> Any:
    return engine.prefill(BlendPrompt("t5 t6", list(ids), "t7 t8"), **values)


def test_a_remote_tier_holds_what_was_read_behind_others(tmp_path: Path, open_engine: MakeEngine) -> None:
    remote = f"file://{tmp_path}/share"
    engine, other = open_engine("one", remote=remote), open_engine("two", remote=remote)
    engine.add(TEXT.chunks)
    engine.flush()
    # There nothing is encoded, here and everywhere the KV is the same.
    assert other.add(TEXT.chunks).encoded == 0
    assert ask(other, "d-3", "d-1").report.hits == 2
    other.flush()
    assert_right(other, *IDS)
    share = [path for path in (tmp_path / "share").rglob("*") if path.is_file()]
    assert len(share) == 8
    # What saw the text that is gone is gone there too.
    seers = [r.id for r in engine.records(IDS) if r is not None and r.later is not None and "d-1" in dict(r.later.seen)]
    engine.delete(["d-1"])
    engine.flush()
    assert seers and len([path for path in (tmp_path / "share").rglob("*") if path.is_file()]) == 8 - 2 - len(seers)
    other.delete(["d-1"])
    assert held(other) == [True] * 3 and sum(later_held(other)) == 3 - len(seers)
    other.add([TEXT.chunk(number) for number in (0, 2, 3)])
    assert_right(other, "d-0", "d-2", "d-3")


@pytest.mark.parametrize("write_back_bytes", [0, 10**6])
def test_misses(open_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, write_back_bytes: int) -> None:
    engine = open_engine(write_back_bytes=write_back_bytes)
    engine.add(TEXT.chunks)
    hits = ask(engine, "d-3", "d-1", "d-2")
    evict(engine, "d-1", "d-2", "d-3")
    passes: list[int] = []
    encode = engine._supply.encode
    monkeypatch.setattr(engine._supply, "encode", lambda found, **kw: passes.append(len(found)) or encode(found, **kw))
    misses = ask(engine, "d-3", "d-1", "d-2")
    assert misses.report.misses == 3
    assert passes == [3]
    torch.testing.assert_close(misses.logits, hits.logits, atol=1e-4, rtol=0)
    engine.flush()
    assert later_held(engine) == [True, True, True, False]


def test_estimates_count_what_is_new(open_engine: MakeEngine) -> None:
    engine = open_engine()
    engine.add([TEXT.chunk(0), TEXT.chunk(2), TEXT.chunk(3)])
    estimate = engine.estimate([TEXT.chunk(1)])
    assert (estimate.chunks, estimate.tokens) == (1, 9)
    assert estimate.disk_bytes > estimate.ram_bytes > 0
    assert estimate.seconds > 0
    assert engine.document("d") == ["d-0", "d-2", "d-3"]
    assert engine.add([TEXT.chunk(1)]).encoded == estimate.chunks
    assert engine.estimate(TEXT.chunks).chunks == 0


def test_prefetching_brings_the_kv_of_the_place_in_the_prompt(open_engine: MakeEngine) -> None:
    open_engine().add(TEXT.chunks)
    engine = open_engine(ram_bytes=10**7)
    assert engine.prefetch(["d-3", "d-2"]).wait(60)
    assert [chunk.tier for chunk in ask(engine, "d-3", "d-2").report.chunks] == ["ram", "ram"]
    assert engine._store.stats().ram_bytes
    [record] = engine.records(["d-2"])
    assert record is not None and record.later is not None
    open_engine().delete([id for id, _ in record.later.seen])
    # Another process has deleted what it had seen: that is of no use any more.
    assert [chunk.hit for chunk in ask(engine, "d-2", "d-2").report.chunks] == [True, False]


def test_a_tenant_has_documents_of_its_own(tmp_path: Path, open_engine: MakeEngine) -> None:
    engines = {name: open_engine(tenant=name) for name in (None, "acme", "umbrella")}
    for engine in engines.values():
        engine.add(TEXT.chunks)
    engines["acme"].delete(["d-1"])
    assert engines["acme"].document("d") == ["d-0", "d-2", "d-3"]
    assert engines["umbrella"].document("d") == IDS
    engines[None]._store.clear("acme")
    assert (engines["acme"].document("d"), engines["acme"].ids()) == ([], [])
    for name in (None, "umbrella"):
        assert_right(engines[name], *IDS)
    assert len(files_of(tmp_path / "store")) == 16
    engines["acme"].add([TEXT.chunk(2)])
    assert_right(engines["acme"], "d-2")
    engines["umbrella"]._store.clear()
    assert [engine.document("d") for engine in engines.values()] == [[], [], []]
    assert check_store(tmp_path / "store").is_clean


def test_what_has_seen_a_deleted_chunk_is_not_shared(open_engine: MakeEngine) -> None:
    engine = open_engine(prefix_bytes=10**7)
    engine.add([*TEXT.chunks, Chunk(words(6, 9), "alone")])
    chunks = ["alone", "d-0", "d-3", "d-2"]
    ahead, rows = 1 + 2, [6, 8, 8, 7]

    def shared(question: str) -> int:
        prompt = BlendPrompt(segments=["t5 t6", *(Chunk(text_of[id], id) for id in chunks), "t7 t8", question])
        return engine.generate(prompt, 1).report.prefix_tokens

    text_of = {str(chunk.id): chunk.text for chunk in TEXT.chunks} | {"alone": words(6, 9)}
    assert shared("t9 t10") == 0
    assert shared("t11") >= ahead + sum(rows)
    seers = {r.id for r in engine.records(IDS) if r is not None and r.later is not None and "d-1" in dict(r.later.seen)}
    first = next(place for place, id in enumerate(chunks) if id in seers)
    engine.delete(["d-1"])
    assert shared("t11") == ahead + sum(rows[:first])
    assert shared("t12") >= ahead + sum(rows)
    # What comes into the document changes nothing that is there.
    engine.add([Chunk(words(9, 1), "new", document="d", start=0)])
    assert shared("t13") >= ahead + sum(rows)
