"""Prefetching: what is named comes nearer, a prompt takes over what is not read yet, and damage is the prompt's business."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store.chunkfile import ChunkFile
from tests.engines import MakeEngine, damage
from tests.families import words
from tests.limits import wait_until

CHUNKS = [Chunk(words(20, seed), f"n{seed}") for seed in range(4)]
NAMES = [str(chunk.id) for chunk in CHUNKS]
PROMPT = BlendPrompt(words(4, 50), NAMES, words(6, 51))

ENGINE = {"strict": True, "self_check": False, "selector": "hkvd", "load_threads": 2}


@pytest.fixture
def open_engine(make_engine: MakeEngine, tmp_path: Path) -> MakeEngine:
    """Make engines on one folder, nothing of which is in RAM yet."""
    with make_engine(tmp_path / "kv") as first:
        first.add(CHUNKS)
    return partial(make_engine, tmp_path / "kv")


def _tiers(engine: BlendEngine) -> list[str | None]:
    return [chunk.tier for chunk in engine.prefill(PROMPT).report.chunks]


def test_what_was_prefetched_is_read_from_ram(open_engine: MakeEngine) -> None:
    engine = open_engine()
    begun = engine.prefetch(["n2", "unknown", "n0", "n2"])
    assert begun.chunks == 3
    assert begun.wait(60)
    assert engine._store.stats().ram_bytes > 0
    # As they would stand in a prompt of these: the first right behind its head, the others behind that.
    assert _tiers(engine) == ["disk", "disk", "ram", "disk"]
    assert engine.prefetch(NAMES).wait(60)
    assert _tiers(engine) == ["ram"] * 4


def test_what_was_prefetched_is_on_the_device_where_that_has_room(open_engine: MakeEngine) -> None:
    engine = open_engine(device_bytes=1 << 20)
    assert engine.prefetch(NAMES[:2]).wait(60)
    assert _tiers(engine)[:2] == ["device"] * 2
    # From RAM too, from which a device tier without room has had nothing.
    engine._store.discard(engine.records(["n0"])[0].key)  # type: ignore[union-attr]
    engine.add(CHUNKS[:1])
    assert engine.prefetch(NAMES[:1]).wait(60)
    assert _tiers(engine)[0] == "device"


def test_logits_do_not_depend_on_it(open_engine: MakeEngine) -> None:
    wanted = open_engine().prefill(PROMPT).logits
    engine = open_engine()
    engine.prefetch(NAMES)
    assert engine.prefill(PROMPT).logits.equal(wanted)


class _Gate:
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


def test_a_prompt_waits_and_takes_the_rest_over(open_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(load_threads=1)
    gate = _Gate(monkeypatch)
    begun = engine.prefetch(NAMES)
    assert gate.reached.wait(60)
    assert not begun.wait(0)
    found: list[str | None] = []
    asking = threading.Thread(target=lambda: found.extend(_tiers(engine)))
    asking.start()
    # The only thread that reads is held: it is the prompt that ends the wait for the others, when it takes them over.
    wait_until(lambda: all(read.cancelled() for read in begun._reads[1:]))
    assert not begun.wait(0)
    assert not found
    gate.open.set()
    asking.join()
    # The first was being read. The prompt read the others itself, each once.
    assert found == ["ram", "disk", "disk", "disk"]
    assert len(gate.keys) == 4
    assert begun.wait(60)


def test_a_prompt_that_needs_none_of_it_does_not_wait(open_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(load_threads=1)
    engine.prefetch(["n3"]).wait(60)
    gate = _Gate(monkeypatch)
    begun = engine.prefetch(["n0", "n1"])
    assert gate.reached.wait(60)
    assert engine.prefill(BlendPrompt(chunks=["n3"], suffix=words(6, 1))).report.chunks[0].tier == "ram"
    gate.open.set()
    assert begun.wait(60)
    assert len(gate.keys) == 2


def test_a_prompt_that_reads_no_kv_takes_nothing_over(open_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(load_threads=1)
    gate = _Gate(monkeypatch)
    begun = engine.prefetch(NAMES)
    assert gate.reached.wait(60)
    assert engine.prefill(PROMPT, blend=engine.blend.replace(enabled=False)).report.fallback_reason is None
    assert not begun.wait(0)
    gate.open.set()
    assert begun.wait(60)
    assert _tiers(engine) == ["ram"] * 4


def test_closing_stops_it(open_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(load_threads=1)
    gate = _Gate(monkeypatch)
    begun = engine.prefetch(NAMES)
    assert gate.reached.wait(60)
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open.set()
    closing.join()
    assert begun.wait(60)
    assert len(gate.keys) == 1
    with pytest.raises(ConfigError, match="closed"):
        engine.prefetch(NAMES)


def test_damage_is_left_to_prompts(open_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = open_engine()
    wanted = engine.prefill(PROMPT).logits
    again = open_engine()
    damage(next((tmp_path / "kv").rglob("*.safetensors")))
    assert again.prefetch(NAMES).wait(60)
    assert "could not be prefetched" in caplog.text
    assert (again.prefill(PROMPT).logits - wanted).abs().max() < 1e-4
    assert _tiers(again).count("ram") == 4
