"""What was met in prompts alone goes with what its text was made of."""

from dataclasses import replace
from pathlib import Path

import pytest

from cacheblend_rag.store import KVStore
from tests.store.kit import key_of, make_kv, open_store, record

ROOM = 1 << 20


@pytest.fixture(params=["ram", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KVStore:
    return open_store(None if request.param == "ram" else tmp_path / "store", ROOM)


def add(store: KVStore, number: int, indexed: bool = True, source: str = "d") -> None:
    store.put(key_of(number), make_kv(number))
    store.name("ns", [replace(record(f"n{number}", number), source=source, indexed=indexed)])


def test_what_no_vector_store_has_goes_with_the_last_that_one_has(store: KVStore) -> None:
    add(store, 1)
    add(store, 2)
    add(store, 3, False)
    add(store, 4, False, source="another")
    # What a vector store has it has, whoever meets it in a prompt.
    add(store, 2, False)
    assert store.names.indexed("ns") == store.names.indexed("ns", ["d", "another"]) == ["n1", "n2"]
    assert store.forget("ns", ["n1"]) == 1
    assert store.names.ids("ns") == ["n2", "n3", "n4"]
    assert store.forget("ns", ["n2"]) == 2
    assert store.names.ids("ns") == ["n4"]
    assert store.holds([key_of(number) for number in range(1, 5)]) == [False, False, False, True]
    assert store.forget("ns", [], ["another"]) == 1


def test_a_miss_that_waits_goes_with_its_source(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", ROOM, write_back_bytes=1 << 20)
    add(store, 1)
    met = replace(record("met", 2), source="d")
    assert store.put_later(key_of(2), make_kv(2), "ns", [met])
    assert store.forget("ns", ["n1"]) == 2
    store.flush()
    assert (store.names.ids("ns"), store.holds([key_of(2)])) == ([], [False])


def test_what_is_kept_in_ram_goes_with_the_name_it_was_met_under(store: KVStore) -> None:
    add(store, 1)
    for number in (2, 3):
        store.cache(key_of(number), make_kv(number), tied=("ns", "n1" if number == 2 else None, "d"))
    store.cache(key_of(4), make_kv(4))
    assert all(store.open(key_of(number)) for number in (2, 3, 4))
    store.forget("ns", ["n1"])
    assert [store.open(key_of(number)) is not None for number in (2, 3, 4)] == [False, False, True]
