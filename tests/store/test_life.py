"""How long KV stays."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from cacheblend_rag import BlendPrompt, Chunk, EngineConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import KVStore
from tests.engines import MakeEngine
from tests.families import words
from tests.store.kit import key_of, make_kv, open_store


@dataclass
class Clock:
    """A clock that is put forward by hand."""

    now: float = 1.8e9

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def open(self, folder: Path | None, ram_bytes: int = 10**6, disk_bytes: int | None = None) -> KVStore:
        return open_store(folder, ram_bytes, disk_bytes, clock=lambda: self.now)


@pytest.mark.parametrize("in_folder", [True, False])
def test_the_longest_life_asked_for_counts(tmp_path: Path, in_folder: bool) -> None:
    clock = Clock()
    store = clock.open(tmp_path if in_folder else None)
    for number in range(1, 5):
        store.put(key_of(number), make_kv(number), ttl_s=100)
    store.prolong([key_of(1)], 10)
    store.prolong([key_of(2)], 200)
    store.prolong([key_of(3), key_of(9)], None)
    store.put(key_of(4), make_kv(4))
    clock.passes(150)
    for _ in range(2):
        assert [store.open(key_of(n)) is not None for n in (1, 2, 3, 4)] == [False, True, True, True]
    clock.passes(100)
    assert store.holds([key_of(n) for n in (1, 2, 3, 4)]) == [False, False, True, True]


def test_settings_and_single_additions(make_engine: MakeEngine) -> None:
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="ttl_s"):
            EngineConfig(ttl_s=wrong)
    clock = Clock()
    store = clock.open(None, 10**7)
    chunks = [Chunk(words(20, 1), "a"), Chunk(words(21, 2), "b")]
    engine = make_engine(store, ttl_s=100)
    with pytest.raises(ConfigError, match="ttl_s=0 must be a positive number of seconds"):
        engine.add(chunks, ttl_s=0)
    engine.add(chunks[:1])
    engine.add(chunks[1:], ttl_s=10)
    # A miss lives as long as the settings say.
    assert engine.prefill(BlendPrompt("t1", ["a", Chunk(words(9, 3), "c")], "t2")).report.misses == 1
    clock.passes(50)
    assert engine.prefill(BlendPrompt("t1", ["a", "b", "c"], "t2")).report.hits == 2
    clock.passes(60)
    report = engine.prefill(BlendPrompt("t1", ["a", "b", "c"], "t2")).report
    assert [chunk.hit for chunk in report.chunks] == [False, True, False]
    assert engine.contains("a")
    # Adding again renews.
    assert engine.add(chunks, ttl_s=1000).named == 2
    assert engine.add(chunks, ttl_s=1000).unchanged == 2
    clock.passes(900)
    assert engine.prefill(BlendPrompt("t1", ["a", "b"], "t2")).report.hits == 2
