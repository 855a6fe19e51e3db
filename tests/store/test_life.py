"""How long KV stays: what is pinned is never dropped for room, and the rest has times to live."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from cacheblend_rag import BlendPrompt, Chunk, EngineConfig
from cacheblend_rag.errors import ConfigError, StoreError, StoreFullError, UnknownChunkError
from cacheblend_rag.store import KVStore, pin_chunks
from tests.engines import MakeEngine
from tests.families import words
from tests.store.kit import files_of, held, key_of, make_kv, open_store, read, record


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


KV_BYTES = make_kv(0).nbytes


def put(store: KVStore, *numbers: int) -> None:
    for number in numbers:
        store.put(key_of(number), make_kv(0))
        store.name("ns", [record(f"n{number}", number)])


def fill(store: KVStore) -> None:
    put(store, 1, 2, 3)


def test_pinned_on_disk(tmp_path: Path) -> None:
    store = open_store(tmp_path, 10**6)
    fill(store)
    size = store.stats().disk_bytes // 3
    store.close()
    store = open_store(tmp_path, 10**6, 3 * size)
    with pytest.raises(UnknownChunkError, match="no chunk has the id 'unknown', 'x'"):
        store.pin("ns", ["n1", "unknown", "n2", "x"])
    assert store.stats().pinned_bytes == 0
    store.pin("ns", ["n1", "n2", "n1"])
    assert store.stats().pinned_bytes == 2 * size
    put(store, 4, 5)
    assert held(store, range(6)) == [1, 2, 5]
    with pytest.raises(StoreFullError, match="pinned KV would take more than the store's budget"):
        open_store(tmp_path, 0, size).pin("ns", ["n5"])
    store.pin("ns", ["n5"])
    with pytest.raises(
        StoreFullError, match=r"pinned KV leaves too little of the store's budget of \d+ bytes \(disk_bytes\)"
    ):
        store.put(key_of(6), make_kv(0))
    assert held(store, range(7)) == [1, 2, 5]


def test_pinned_in_ram() -> None:
    store = open_store(None, 3 * KV_BYTES)
    fill(store)
    store.pin("ns", ["n1"])
    put(store, 4, 5, 6)
    assert held(store, range(7)) == [1, 5, 6]
    assert store.stats().pinned_bytes == KV_BYTES
    store.pin("ns", ["n5", "n6"])
    with pytest.raises(StoreFullError, match="pinned KV leaves less than"):
        store.put(key_of(7), make_kv(0))
    store.unpin("ns", ["n5"])
    put(store, 7)
    assert held(store, range(8)) == [1, 6, 7]
    store.forget("ns", ["n1", "n6"])
    put(store, 8, 9, 10)
    assert held(store, range(11)) == [8, 9, 10]
    # What was pinned while it was not held is pinned when it comes back.
    store.pin("ns", ["n3"])
    put(store, 3, 11, 12, 13)
    assert held(store, range(14)) == [3, 12, 13]


def test_the_copy_in_ram_stays(tmp_path: Path) -> None:
    store = open_store(tmp_path, 2 * KV_BYTES)
    fill(store)
    reader = store.open(key_of(1))
    assert reader is not None
    read(reader)
    store.pin("ns", ["n1"])
    put(store, 4, 5, 6, 7)
    for path in files_of(tmp_path):
        path.write_bytes(b"")
    assert store.open(key_of(1)) is not None
    assert store.open(key_of(4)) is None


def test_the_engines_pins(make_engine: MakeEngine, tmp_path: Path) -> None:
    chunks = [Chunk(words(20, seed), f"n{seed}") for seed in range(4)]
    engine = make_engine(tmp_path, disk_bytes=90_000)
    engine.add(chunks[:1])
    assert engine._store.stats().disk_bytes < 40_000
    with pytest.raises(UnknownChunkError, match="nobody"):
        engine.pin(["n0", "nobody"])
    engine.pin(["n0"])
    engine.add(chunks[1:])
    records = engine.records([f"n{seed}" for seed in range(4)])
    held = [engine._store.holds(list(each.keys)) for each in records if each]
    assert held[0] == [True, True] and engine._store.stats().evictions > 0 and not all(map(all, held))
    with pytest.raises(UnknownChunkError, match="nobody"):
        engine.unpin(["n0", "nobody"])
    engine.unpin(["n0"])
    assert engine._store.stats().pinned_bytes == 0


def test_pins_of_a_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0)
    for number, space, tenant in ((1, "x", ""), (2, "y", ""), (3, "z", "acme")):
        store.put(key_of(number), make_kv(0), tenant=tenant)
        store.name(space, [record("n", number), record(f"n{number}", number)], tenant=tenant)
    size = store.stats().disk_bytes // 3
    # Of every model, or of one tenant.
    assert pin_chunks(tmp_path, ["n", "n"]) == store.stats().pinned_bytes == 3 * size
    assert pin_chunks(tmp_path, ["n"], pinned=False, tenant="") == size
    assert pin_chunks(tmp_path, ["n"], pinned=False, tenant="acme") == 0
    with pytest.raises(UnknownChunkError, match="'n3'"):
        pin_chunks(tmp_path, ["n1", "n3"], tenant="")
    assert store.stats().pinned_bytes == 0
    with pytest.raises(StoreError):
        pin_chunks(tmp_path / "nowhere", ["n"])
