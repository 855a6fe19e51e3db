"""What every store promises, in RAM and in a folder."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import KVStore, NameChanges, NodeRecord
from tests.store.kit import files_of, is_held, key_of, make_kv, open_store, read, record, same


@pytest.fixture(params=["ram", "folder", "folder without ram"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KVStore:
    location = None if request.param == "ram" else tmp_path / "store"
    return open_store(location, 0 if request.param == "folder without ram" else 10**6)


def test_put_and_open(store: KVStore) -> None:
    for number, dtype in enumerate([torch.float32, torch.float16, torch.bfloat16]):
        kv = make_kv(number, dtype=dtype)
        store.put(key_of(number), kv)
        for _ in range(2):
            reader = store.open(key_of(number))
            assert reader is not None
            assert same(read(reader), kv)
    assert store.open(key_of(9)) is None
    assert store.holds([key_of(0), key_of(9), key_of(2)]) == [True, False, True]
    assert store.stats().entries == 3


def test_names(store: KVStore) -> None:
    store.name("ns", [record("b", 1), record("a", 2)])
    store.name("other", [record("a", 3)])
    store.name("ns", [record("b", 4)])
    assert store.names.ids("ns") == ["b", "a"]
    assert store.names.lookup("ns", ["a", "x", "b"]) == [record("a", 2), None, record("b", 4)]
    assert store.names.lookup("other", ["a", "b"]) == [record("a", 3), None]
    assert store.stats().nodes == 3
    assert store.forget("ns", ["b", "x", "b"]) == 1
    store.name("ns", [record("b", 1)])
    assert store.names.ids("ns") == ["a", "b"]
    assert store.names.ids("unknown") == []


def test_odd_names(store: KVStore) -> None:
    odd = ["", "a\0b", "ü" * 500, "'; DROP TABLE nodes; --", "%", "A", "a"]
    records = [NodeRecord(name, key_of(1), "", ()) for name in odd]
    store.name("", records)
    assert store.names.lookup("", odd) == records
    assert store.names.ids("") == odd
    assert store.forget("", odd) == len(odd)


def test_a_name_that_is_not_unicode(store: KVStore) -> None:
    with pytest.raises(StoreError, match="not valid Unicode"):
        store.name("ns", [record("\ud800", 1)])
    with pytest.raises(StoreError, match="not valid Unicode"):
        store.names.lookup("ns", ["\ud800"])


def test_kv_goes_with_its_last_name(store: KVStore) -> None:
    store.put(key_of(1), make_kv(1))
    store.name("ns", [record("a", 1), record("b", 1)])
    store.name("other", [record("a", 1)])
    assert store.forget("ns", ["a", "b"]) == 2
    assert store.holds([key_of(1)]) == [True]
    assert store.forget("other", ["a"]) == 1
    assert store.holds([key_of(1)]) == [False]
    assert store.open(key_of(1)) is None
    assert store.stats().ram_bytes == store.stats().disk_bytes == 0


def test_nameless_kv_is_kept(store: KVStore) -> None:
    store.put(key_of(1), make_kv(1))
    store.name("ns", [record("a", 2)])
    store.forget("ns", ["a"])
    assert store.holds([key_of(1)]) == [True]


def test_a_reader_outlives_its_entry(store: KVStore) -> None:
    store.put(key_of(1), make_kv(1))
    reader = store.open(key_of(1))
    assert reader is not None
    reader.layer(0)
    store.discard(key_of(1))
    assert same(read(reader), make_kv(1))
    assert store.open(key_of(1)) is None
    assert store.stats().ram_bytes == 0


def test_closed(store: KVStore) -> None:
    store.put(key_of(1), make_kv(1))
    store.close()
    store.close()
    for use in (
        lambda: store.open(key_of(1)),
        lambda: store.put(key_of(1), make_kv(1)),
        lambda: store.holds([key_of(1)]),
        lambda: store.discard(key_of(1)),
        lambda: store.name("ns", [record("a", 1)]),
        lambda: store.names.lookup("ns", ["a"]),
        lambda: store.forget("ns", ["a"]),
        lambda: store.names.ids("ns"),
        lambda: store.clear(),
        lambda: store.stats(),
    ):
        with pytest.raises(StoreError, match="closed"):
            use()


@pytest.mark.parametrize(
    "key", ["", "../../../../etc/passwd", "ab", "AB" * 16, "ab" * 65, "ab" * 15 + "/.", "ab" * 16 + "\n"]
)
def test_what_is_no_key(store: KVStore, key: str) -> None:
    with pytest.raises(StoreError, match="not a store key"):
        store.put(key, make_kv(1))
    with pytest.raises(StoreError, match="not a store key"):
        store.open(key)


def test_many_threads(store: KVStore) -> None:
    def work(thread: int) -> None:
        for turn in range(20):
            number = (thread * 7 + turn) % 5
            store.put(key_of(number), make_kv(number))
            reader = store.open(key_of(number))
            assert reader is None or same(read(reader), make_kv(number))
            store.name("ns", [record(f"n{thread}", number)])
            if turn % 5 == 0:
                store.forget("ns", [f"n{thread}"])
                store.discard(key_of(number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_privacy(tmp_path: Path) -> None:
    private, shared = open_store(None, 0), open_store(tmp_path / "s", 0)
    assert private.is_private
    assert not shared.is_private
    shared.put(key_of(1), make_kv(1))
    (file,) = files_of(tmp_path / "s")
    more = [*(tmp_path / "s").glob("index.sqlite*"), *(tmp_path / "s" / "tmp").iterdir()]
    for path in [file, tmp_path / "s" / "store.json", *more]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_reopened(tmp_path: Path) -> None:
    with_kv = open_store(str(tmp_path / "a" / "b"), 10**6)
    with_kv.put(key_of(1), make_kv(1))
    with_kv.name("ns", [record("a", 1)])
    with_kv.close()
    again = open_store(tmp_path / "a" / "b", 10**6)
    assert is_held(again, 1)
    assert again.names.lookup("ns", ["a"]) == [record("a", 1)]
    again.close()
    left = sorted(path.name for path in (tmp_path / "a" / "b").iterdir())
    assert left == ["index.sqlite", "kv", "reserve", "store.json", "store.lock", "tmp"]
    assert not list((tmp_path / "a" / "b" / "tmp").iterdir())


NAMES = st.sampled_from("abcdef")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("name"), st.sampled_from(["ns", "other"]), NAMES, st.integers(0, 3)),
        st.tuples(st.just("forget"), st.sampled_from(["ns", "other"]), NAMES, st.just(0)),
        st.tuples(st.just("clear"), st.just(""), st.just(""), st.just(0)),
    ),
    max_size=12,
)


class Follower:
    """Keeps the names of a namespace in mind by what changed only."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[str, str]] = {}
        self.mark: int | None = None

    def follow(self, changes: NameChanges) -> dict[str, str]:
        assert changes.whole == (self.mark is None)
        for number, id, digest in changes.names:
            self.known.pop(number, None)
            if id is not None and digest is not None:
                self.known[number] = id, digest
        self.mark = changes.mark
        return dict(self.known.values())


def all_names(store: KVStore) -> dict[str, str]:
    records = store.names.lookup("ns", store.names.ids("ns"))
    return {each.id: each.text_hash for each in records if each is not None}


@settings(max_examples=60)
@given(rounds=st.lists(STEPS, min_size=1, max_size=5))
def test_following_the_changes_is_as_good_as_asking_for_all(rounds: list[list[tuple[str, str, str, int]]]) -> None:
    store, follower = open_store(None, 10**6), Follower()
    for steps in rounds:
        for step, namespace, name, number in steps:
            if step == "name":
                store.name(namespace, [record(name, number)])
            elif step == "forget":
                store.forget(namespace, [name])
            else:
                store.clear()
        assert follower.follow(store.names.changes("ns", follower.mark)) == all_names(store)
        assert store.names.changes("ns", follower.mark).names == []


def test_another_connection_sees_them(tmp_path: Path) -> None:
    one, two, follower = open_store(tmp_path, 10**6), open_store(tmp_path, 10**6), Follower()
    one.name("ns", [record("a", 1), record("b", 2)])
    assert follower.follow(two.names.changes("ns")) == {"a": "hash1", "b": "hash2"}
    one.name("ns", [record("a", 3)])
    one.forget("ns", ["b"])
    changes = two.names.changes("ns", follower.mark)
    assert len(changes.names) == 2
    assert follower.follow(changes) == {"a": "hash3"}


def test_who_asks_too_late_gets_all(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0)
    store.name("ns", [record("old", 1)])
    mark = store.names.changes("ns").mark
    store.name("ns", [record(str(number), 2) for number in range(10_000)])
    assert not store.names.changes("ns", mark).whole
    store.name("ns", [record("one more", 2)])
    changes = store.names.changes("ns", mark)
    assert changes.whole
    assert len(changes.names) == 10_002
    # A mark of another index, which was further on.
    assert store.names.changes("ns", changes.mark + 5).whole


def test_no_name_is_kept_that_was_removed(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0)
    store.name("ns", [record("a very personal name", 1)])
    store.forget("ns", ["a very personal name"])
    store.close()
    files = [file.read_bytes() for file in tmp_path.iterdir() if file.is_file()]
    assert not any(b"personal" in content for content in files)
