"""All that is done with chunks is done with the chunks of documents, in their context."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.store import check_store
from tests.core.documents.texts import TOLERANCE, Text, distance
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
    return engine._store.holds([record.key for record in engine.records(IDS) if record is not None])


def assert_right(engine: BlendEngine, numbers: list[int], there: list[int]) -> None:
    for number in numbers:
        assert distance(engine, f"d-{number}", TEXT.context(number, there)) < TOLERANCE


def ask(engine: BlendEngine, *ids: str, **values: Any) -> Any:
    return engine.prefill(BlendPrompt("t5 t6", list(ids), "t7 t8"), **values)


def test_a_remote_tier_holds_what_was_encoded_in_its_document(tmp_path: Path, open_engine: MakeEngine) -> None:
    remote = f"file://{tmp_path}/share"
    engine, other = open_engine("one", remote=remote), open_engine("two", remote=remote)
    engine.add(TEXT.chunks)
    engine.flush()
    # There nothing is encoded, here and everywhere the KV is the same.
    assert other.add(TEXT.chunks).encoded == 0
    assert ask(other, "d-3", "d-1").report.hits == 2
    other.flush()
    assert_right(other, [0, 1, 2, 3], [0, 1, 2, 3])
    share = [path for path in (tmp_path / "share").rglob("*") if path.is_file()]
    assert len(share) == 4
    # What saw the text that is gone is gone there too.
    engine.delete(["d-1"])
    engine.flush()
    assert len([path for path in (tmp_path / "share").rglob("*") if path.is_file()]) == 1
    other.delete(["d-1"])
    assert held(other) == [True, False, False]
    assert ask(other, "d-3").report.misses == 1
    other.flush()
    assert_right(other, [0, 3], [0, 2, 3])


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
    assert_right(engine, [0, 1, 2, 3], [0, 1, 2, 3])


def test_a_document_that_is_too_long_to_wait_for_is_read_in_the_background(open_engine: MakeEngine) -> None:
    engine = open_engine(miss_tokens=20)
    engine.add(TEXT.chunks)
    hits = ask(engine, "d-1", "d-3")
    evict(engine, *IDS)
    late = ask(engine, "d-1", "d-3")
    assert late.report.hits == 0
    # In one document they are waited for together or not at all, and what is not is text, not chunks encoded alone.
    assert [chunk.reason for chunk in late.report.chunks] == [
        "its KV was evicted: dropped for room, or expired; "
        "reading its document would take more than miss_tokens=20, so it is computed like text and encoded in the background"
    ] * 2
    whole = ask(engine, "d-1", "d-3", blend=engine.blend.replace(enabled=False))
    torch.testing.assert_close(late.logits, whole.logits, atol=1e-4, rtol=0)
    engine.flush()
    assert held(engine) == [False, True, False, True]
    assert_right(engine, [1, 3], [0, 1, 2, 3])
    again = ask(engine, "d-1", "d-3")
    assert again.report.hits == 2
    torch.testing.assert_close(again.logits, hits.logits, atol=1e-4, rtol=0)
    # What stands at the beginning of its document is encoded at once, as if it were alone.
    reasons = [chunk.reason for chunk in ask(engine, "d-0", "d-2").report.chunks]
    assert reasons[0] == "its KV was evicted: dropped for room, or expired"
    assert "miss_tokens=20" in str(reasons[1])
    engine.flush()
    assert held(engine) == [True] * 4


def test_a_document_that_is_deleted_while_it_waits_is_not_stored(open_engine: MakeEngine) -> None:
    engine = open_engine(miss_tokens=0)
    engine.add(TEXT.chunks)
    evict(engine, *IDS)
    with engine._supply.scheduler:
        ask(engine, "d-2")
        engine.delete(["d-1"])
    engine.flush()
    assert held(engine) == [False] * 3
    assert engine._store.stats().entries == 0


def test_estimates_count_what_is_displaced(open_engine: MakeEngine) -> None:
    engine = open_engine()
    engine.add([TEXT.chunk(0), TEXT.chunk(2), TEXT.chunk(3)])
    estimate = engine.estimate([TEXT.chunk(1)])
    assert (estimate.chunks, estimate.tokens) == (3, 9 + 7 + 8)
    assert estimate.disk_bytes > estimate.ram_bytes > 0
    assert estimate.seconds > 0
    assert engine.document("d") == ["d-0", "d-2", "d-3"]
    assert engine.add([TEXT.chunk(1)]).encoded == estimate.chunks
    assert engine.estimate(TEXT.chunks).chunks == 0


def test_prefetching_brings_the_kv_of_the_context_there_is(open_engine: MakeEngine) -> None:
    open_engine().add(TEXT.chunks)
    engine = open_engine(ram_bytes=10**7)
    assert engine.prefetch(["d-2", "d-3"]).wait(60)
    assert [chunk.tier for chunk in ask(engine, "d-1", "d-2").report.chunks] == ["disk", "ram"]
    before = engine._store.stats().ram_bytes
    assert before
    open_engine().delete(["d-0"])
    # Another process has changed the document: nothing in RAM is of use any more.
    assert engine.prefetch(["d-2", "d-3"]).wait(60)
    assert engine._store.stats().ram_bytes == 0
    assert ask(engine, "d-1", "d-2").report.misses == 2


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
        assert_right(engines[name], [0, 1, 2, 3], [0, 1, 2, 3])
    assert len(files_of(tmp_path / "store")) == 8
    engines["acme"].add([TEXT.chunk(2)])
    assert_right(engines["acme"], [2], [2])
    engines["umbrella"]._store.clear()
    assert [engine.document("d") for engine in engines.values()] == [[], [], []]
    assert check_store(tmp_path / "store").is_clean


def test_what_stands_behind_a_chunk_with_a_changed_context_is_not_shared(open_engine: MakeEngine) -> None:
    engine = open_engine(prefix_bytes=10**7)
    engine.add([*TEXT.chunks, Chunk(words(6, 9), "alone")])
    chunks = ["alone", "d-0", "d-3", "d-2"]
    rows = [6, 8, 8, 7]
    ahead = 1 + 2

    def shared(question: str) -> int:
        prompt = BlendPrompt(segments=["t5 t6", *(Chunk(text_of[id], id) for id in chunks), "t7 t8", question])
        return engine.generate(prompt, 1).report.prefix_tokens

    text_of = {str(chunk.id): chunk.text for chunk in TEXT.chunks} | {"alone": words(6, 9)}
    assert shared("t9 t10") == 0
    assert shared("t11") >= ahead + sum(rows)
    engine.delete(["d-1"])
    # d-0 stands before what is gone; d-3, which stands behind it, comes first in the prompt.
    assert shared("t11") == ahead + rows[0] + rows[1]
    assert shared("t12") >= ahead + sum(rows)
    engine.add([Chunk(words(9, 1), "new", document="d", start=0)])
    # It begins where d-0 does, and came later.
    assert shared("t11") == ahead + rows[0] + rows[1]
