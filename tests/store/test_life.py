"""Times to live, whatever the clocks show."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag import BlendPrompt, Chunk, EngineConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import KVStore, StoreClock, check_store
from cacheblend_rag.store.database import Database
from tests.engines import MakeEngine
from tests.families import words
from tests.store.kit import files_of, is_held, key_of, make_kv, open_store, read, record, same


@dataclass
class Clocks:
    """A wall clock that people set, and a steady one that they cannot."""

    wall: float = 1.8e9
    steady: float = 500.0

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds

    def clock(self) -> StoreClock:
        return StoreClock(lambda: self.wall, lambda: self.steady)

    def open(self, folder: Path | None, ram_bytes: int = 10**6, disk_bytes: int | None = None) -> KVStore:
        return open_store(folder, ram_bytes, disk_bytes, clock=self.clock())


@pytest.mark.parametrize("ram_bytes", [0, 10**6])
def test_what_has_expired_is_a_miss(tmp_path: Path, ram_bytes: int) -> None:
    clocks = Clocks()
    store = clocks.open(tmp_path, ram_bytes)
    for number, ttl_s in ((1, 60), (2, None)):
        store.put(key_of(number), make_kv(number), ttl_s=ttl_s)
    store.name("ns", [record("n1", 1)])
    clocks.passes(59)
    assert store.holds([key_of(1), key_of(2)]) == [True, True]
    reader = store.open(key_of(1))
    assert reader is not None
    clocks.passes(1)
    assert store.holds([key_of(1), key_of(2)]) == [False, True]
    assert store.open(key_of(1)) is None
    assert store.names.lookup("ns", ["n1"]) == [record("n1", 1)]
    # Who is reading goes on.
    assert same(read(reader), make_kv(1))
    assert store.holds([key_of(1)]) == [False]
    # The next addition drops it.
    store.put(key_of(3), make_kv(3), ttl_s=5)
    assert len(files_of(tmp_path)) == 2
    store.put(key_of(1), make_kv(1), ttl_s=60)
    assert is_held(store, 1)
    store.close()
    assert check_store(tmp_path).is_clean


def test_in_ram_alone() -> None:
    clocks = Clocks()
    store = clocks.open(None)
    store.put(key_of(1), make_kv(1), ttl_s=10)
    store.cache(key_of(2), make_kv(2), ttl_s=10)
    store.put(key_of(3), make_kv(3))
    clocks.passes(10)
    assert store.holds([key_of(n) for n in (1, 2, 3)]) == [False, False, True]
    assert [store.open(key_of(n)) is None for n in (1, 2, 3)] == [True, True, False]
    store.put(key_of(1), make_kv(1))
    clocks.passes(10**6)
    assert store.open(key_of(1)) is not None


@pytest.mark.parametrize("in_folder", [True, False])
def test_the_longest_life_asked_for_counts(tmp_path: Path, in_folder: bool) -> None:
    clocks = Clocks()
    store = clocks.open(tmp_path if in_folder else None)
    for number in range(1, 5):
        store.put(key_of(number), make_kv(number), ttl_s=100)
    store.prolong([key_of(1)], 10)
    store.prolong([key_of(2)], 200)
    store.prolong([key_of(3), key_of(9)], None)
    store.put(key_of(4), make_kv(4))
    clocks.passes(150)
    for _ in range(2):
        assert [store.open(key_of(n)) is not None for n in (1, 2, 3, 4)] == [False, True, True, True]
    clocks.passes(100)
    assert store.holds([key_of(n) for n in (1, 2, 3, 4)]) == [False, False, True, True]


def test_a_longer_life_is_noticed_by_others(tmp_path: Path) -> None:
    clocks = Clocks()
    one, two = clocks.open(tmp_path), clocks.open(tmp_path)
    one.put(key_of(1), make_kv(1), ttl_s=10)
    assert two.open(key_of(1)) is not None
    two.prolong([key_of(1)], None)
    clocks.passes(10)
    assert one.open(key_of(1)) is not None


def test_a_clock_that_is_set_while_the_store_is_open(tmp_path: Path) -> None:
    clocks = Clocks()
    store = clocks.open(tmp_path)
    store.put(key_of(1), make_kv(1), ttl_s=60)
    for jump in (-(10**7), 10**9, -(10**9) + 5):
        clocks.wall += jump
        store.put(key_of(2), make_kv(2), ttl_s=60)
        assert store.holds([key_of(1), key_of(2)]) == [True, True]
        store.discard(key_of(2))
    clocks.passes(60)
    assert store.holds([key_of(1)]) == [False]


def test_a_clock_that_is_set_while_the_store_is_closed(tmp_path: Path) -> None:
    clocks = Clocks()
    store = clocks.open(tmp_path)
    store.put(key_of(1), make_kv(1), ttl_s=3600)
    store.close()
    # Back: no time has passed, and from then on it passes as it should.
    clocks.wall -= 10**7
    clocks.steady = 0
    store = clocks.open(tmp_path)
    assert store.holds([key_of(1)]) == [True]
    clocks.passes(1800)
    assert store.holds([key_of(1)]) == [True]
    store.close()
    clocks.passes(1000)
    store = clocks.open(tmp_path)
    assert store.holds([key_of(1)]) == [True]
    store.close()
    clocks.passes(900)
    store = clocks.open(tmp_path)
    assert store.holds([key_of(1)]) == [False]
    # Forward by years, and right again: what expired is a miss, and lives of later additions are as long as they should be.
    store.close()
    clocks.wall += 10**9
    store = clocks.open(tmp_path)
    store.put(key_of(2), make_kv(2), ttl_s=60)
    store.close()
    clocks.wall -= 10**9
    store = clocks.open(tmp_path)
    assert store.holds([key_of(2)]) == [True]
    store.put(key_of(3), make_kv(3), ttl_s=60)
    clocks.passes(60)
    assert store.holds([key_of(2), key_of(3)]) == [False, False]
    store.close()
    assert check_store(tmp_path).is_clean


@settings(max_examples=100)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("pass"), st.floats(0, 1e6)),
            st.tuples(st.just("set"), st.floats(-1e9, 1e9)),
            st.tuples(st.just("reopen"), st.just(0.0)),
        )
    )
)
def test_the_stores_time_only_grows(steps: list[tuple[str, float]]) -> None:
    clocks = Clocks()
    database = Database(None)
    clock = clocks.clock()
    clock.save(database)
    before, ran = clock.now(), 0.0
    for step, seconds in steps:
        if step == "pass":
            clocks.passes(seconds)
            ran += seconds
        elif step == "set":
            clocks.wall += seconds
        else:
            clock.save(database)
            clock = clocks.clock()
            clock.load(database)
        now = clock.now()
        assert now >= before - 1e-6
        before = now
    assert before >= 1.8e9 + ran - 1e-3


def test_settings_and_single_additions(make_engine: MakeEngine) -> None:
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="ttl_s"):
            EngineConfig(ttl_s=wrong)
    clocks = Clocks()
    store = clocks.open(None, 10**7)
    chunks = [Chunk(words(20, 1), "a"), Chunk(words(21, 2), "b")]
    engine = make_engine(store, ttl_s=100)
    with pytest.raises(ConfigError, match="ttl_s=0 must be a positive number of seconds"):
        engine.add(chunks, ttl_s=0)
    engine.add(chunks[:1])
    engine.add(chunks[1:], ttl_s=10)
    # A miss lives as long as the settings say.
    assert engine.prefill(BlendPrompt("t1", [Chunk(words(9, 3), "c")], "t2")).report.misses == 1
    clocks.passes(50)
    assert engine.prefill(BlendPrompt("t1", ["a", "b", "c"], "t2")).report.hits == 2
    clocks.passes(60)
    report = engine.prefill(BlendPrompt("t1", ["a", "b", "c"], "t2")).report
    assert [chunk.hit for chunk in report.chunks] == [False, True, False]
    assert engine.contains("a")
    # Adding again renews.
    assert engine.add(chunks, ttl_s=1000).unchanged == 2
    clocks.passes(900)
    assert engine.prefill(BlendPrompt("t1", ["a", "b"], "t2")).report.hits == 2
