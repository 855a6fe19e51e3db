"""Prefetching: what is named comes nearer, a prompt takes over what is not read yet, and damage is the prompt's business."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.store.chunkfile import ChunkFile
from tests.engines import MakeEngine
from tests.families import words
from tests.store.kit import damage

CHUNKS = [Chunk(words(20, seed), f"n{seed}") for seed in range(4)]
NAMES = [str(chunk.id) for chunk in CHUNKS]
PROMPT = BlendPrompt(words(4, 50), NAMES, words(6, 51))

ENGINE = {"strict": True, "self_check": False, "selector": "hkvd", "load_threads": 1}


@pytest.fixture
def open_engine(make_engine: MakeEngine, tmp_path: Path) -> MakeEngine:
    """Make engines on one folder, nothing of which is in RAM yet."""
    with make_engine(tmp_path / "kv") as first:
        first.add(CHUNKS)
    return partial(make_engine, tmp_path / "kv")


def tiers(engine: BlendEngine) -> list[str | None]:
    return [chunk.tier for chunk in engine.prefill(PROMPT).report.chunks]


def test_what_was_prefetched_is_nearer_and_answers_are_the_same(open_engine: MakeEngine) -> None:
    wanted = open_engine().prefill(PROMPT).logits
    engine = open_engine()
    begun = engine.prefetch(["n2", "unknown", "n0", "n2"])
    assert begun.chunks == 3
    assert begun.wait(60)
    # As they would stand in a prompt of these: the first right behind its head, the others behind that.
    assert tiers(engine) == ["disk", "disk", "ram", "disk"]
    assert engine.prefetch(NAMES).wait(60)
    result = engine.prefill(PROMPT)
    assert [chunk.tier for chunk in result.report.chunks] == ["ram"] * 4
    assert result.logits.equal(wanted)


class Gate:
    """Holds the first chunk file that is read, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open, self.keys = threading.Event(), threading.Event(), list[str]()
        read = ChunkFile.packed_layer

        def slow(file: ChunkFile, index: int) -> Any:
            if file.key not in self.keys:
                self.keys.append(file.key)
            self.reached.set()
            assert self.open.wait(60)
            return read(file, index)

        monkeypatch.setattr(ChunkFile, "packed_layer", slow)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, open_engine: MakeEngine) -> Gate:
    return Gate(monkeypatch)


def test_a_prompt_waits_and_takes_the_rest_over(open_engine: MakeEngine, gate: Gate) -> None:
    engine = open_engine()
    engine.add([Chunk(words(9, 9), "near")])
    begun = engine.prefetch(NAMES)
    assert gate.reached.wait(60)
    assert not begun.wait(0)
    # Who needs none of it does not wait.
    assert engine.prefill(BlendPrompt(chunks=["near"], suffix=words(6, 1))).report.hits == 1
    assert engine.prefill(PROMPT, blend=engine.blend.replace(enabled=False)).report.fallback_reason == "blending is off"
    assert not begun.wait(0)
    found: list[str | None] = []
    asking = threading.Thread(target=lambda: found.extend(tiers(engine)))
    asking.start()
    asking.join(0.5)
    assert not found
    gate.open.set()
    asking.join()
    # The first was being read, and is not read again; nor is any other.
    assert found[0] == "ram"
    assert len(gate.keys) == 4
    assert begun.wait(60)


def test_closing_stops_it_and_damage_is_left_to_prompts(open_engine: MakeEngine, tmp_path: Path) -> None:
    wanted = open_engine().prefill(PROMPT).logits
    damage(next((tmp_path / "kv").rglob("*.safetensors")))
    engine, closed = open_engine(), open_engine()
    begun = [each.prefetch(NAMES) for each in (engine, closed)]
    closed.close()
    assert all(each.wait(60) for each in begun)
    assert (engine.prefill(PROMPT).logits - wanted).abs().max() < 1e-4
