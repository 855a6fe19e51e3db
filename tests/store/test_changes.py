"""What changed among the names, told to who asks again: the same as comparing all of them."""

import sqlite3
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.store import KVStore, NameChanges
from tests.store.kit import open_store, record

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


def test_an_index_that_never_noted_changes_gives_all_names(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0)
    store.name("ns", [record("a", 1)])
    store.close()
    connection = sqlite3.connect(tmp_path / "index.sqlite")
    for (trigger,) in connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'trigger' AND sql LIKE '%INTO changes%'"
    ).fetchall():
        connection.execute(f"DROP TRIGGER {trigger}")
    connection.execute("DROP TABLE changes")
    connection.commit()
    connection.close()
    store = open_store(tmp_path, 0)
    first = store.names.changes("ns")
    assert [name[1:] for name in first.names] == [("a", "hash1")]
    store.name("ns", [record("b", 2)])
    later = store.names.changes("ns", first.mark)
    assert [name[1:] for name in later.names] == [("b", "hash2")]
