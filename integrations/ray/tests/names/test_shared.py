"""Stores of several machines that share names: what one acknowledges the next look-up of any other finds."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.chunk import chunk_key, context_digest
from cacheblend_rag.errors import ConfigError, RemoteUnavailableError, StoreError, StoreFormatError
from cacheblend_rag.store import KVStore, Later, NodeRecord, open_store
from cacheblend_ray import table
from integrations.ray.tests.names.conftest import run_sql
from tests.core.documents.test_machine import DocumentMachine, run_machine
from tests.families import tiny_model, tiny_tokenizer, words
from tests.store.kit import key_of, make_kv, piece, record, start, start_with_pipe
from tests.store.workers import name_together, name_until_killed

NAMESPACE = "ns"


def opened(folder: Path | None, names: str) -> KVStore:
    return open_store(folder, 10**6, names=names)


@pytest.fixture
def pair(tmp_path: Path, names: str) -> Iterator[tuple[KVStore, KVStore]]:
    with ExitStack() as stack:
        stores = [opened(tmp_path / name, names) for name in ("one", "two")]
        for store in stores:
            stack.callback(store.close)
        yield stores[0], stores[1]


def ids_of(store: KVStore) -> list[str]:
    return sorted(store.names.ids(NAMESPACE))


def laters_of(store: KVStore, ids: list[str]) -> list[Later | None]:
    return [record and record.later for record in store.names.lookup(NAMESPACE, ids)]


def is_said(names: str, tokens: str) -> bool:
    return any(tokens in str(state) for (state,) in run_sql(names, "SELECT state FROM cacheblend_units"))


def behind(record: NodeRecord, other: NodeRecord) -> NodeRecord:
    """Return a record with KV that was read behind another one's text."""
    key = chunk_key(NAMESPACE, record.token_ids + record.separator, None, context_digest(other.token_ids))
    return replace(record, later=Later(key, other.token_ids, ((other.id, other.key),)))


# Any calls of two machines, against the naive library.


def machine_at(url: str) -> type[DocumentMachine]:
    """Return a machine whose two engines have folders of their own, and share names."""

    class SharedMachine(DocumentMachine):
        def __init__(self) -> None:
            super().__init__()
            if url.startswith("sqlite"):
                self.url = f"sqlite:///{self.folder}/names.sqlite"
            else:
                run_sql(url, "DROP TABLE IF EXISTS cacheblend_log, cacheblend_units")
                self.url = url

        def folder_of(self, second: bool) -> Path:
            return self.folder / str(int(second))

        def store_of(self, second: bool) -> KVStore:
            folder = self.folder_of(second)
            return open_store(folder, names=self.url, **self.options)

    return SharedMachine


def test_sampled(names: str) -> None:
    run_machine(8, 15, machine=machine_at(names))


@pytest.mark.full
@pytest.mark.parametrize("part", range(3))
def test_whole(names: str, part: int) -> None:
    run_machine(40, 40, part, machine_at(names), database=None)


# Processes and threads at the same time.


@pytest.mark.parametrize("times", [4, pytest.param(50, marks=pytest.mark.full)])
def test_a_joining_machine_has_nothing_deleted(tmp_path: Path, names: str, times: int) -> None:
    first = opened(tmp_path / "first", names)
    for number in range(times):
        ids = [f"{number}-{each}" for each in range(40)]
        first.name(NAMESPACE, [record(id, 1) for id in ids])
        made: list[KVStore] = []
        joining = threading.Thread(target=lambda made=made: made.append(opened(None, names)))
        joining.start()
        gone = ids[:: 1 + number % 3]
        first.forget(NAMESPACE, gone)
        joining.join()
        [joined] = made
        # The deletion was acknowledged before this look-up began.
        found = joined.names.lookup(NAMESPACE, ids)
        assert [record is None for record in found] == [id in gone for id in ids]
        joined.close()
        first.forget(NAMESPACE, ids)
    first.close()


def test_writers_end_in_one_state(tmp_path: Path, names: str) -> None:
    # Two machines, one of them with two processes.
    folders = [tmp_path / "a", tmp_path / "a", tmp_path / "b"]
    workers = [start(name_together, folder, names, number, 12) for number, folder in enumerate(folders)]
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    stores = [opened(tmp_path / name, names) for name in ("a", "b", "c")]
    states = [(s.names.document(NAMESPACE, "d"), ids_of(s), s.names.lookup(NAMESPACE, ids_of(s))) for s in stores]
    assert states[0] == states[1] == states[2]
    assert states[0][0] == ["w0", "w1", "w2", "shared"]
    assert len(states[0][1]) == 3 * 12 + 4
    for store in stores:
        store.close()


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.full)])
def test_what_a_killed_machine_acknowledged_stays(tmp_path: Path, names: str, kills: int) -> None:
    told: dict[str, bool] = {}
    for number in range(kills):
        process, told_here = start_with_pipe(name_until_killed, tmp_path / f"m{number}", names, number)
        for _ in range(5 + number):
            id, is_there = told_here.recv()
            told[id] = is_there
        process.kill()
        process.join()
        while told_here.poll():
            try:
                id, is_there = told_here.recv()
            except EOFError:
                break
            told[id] = is_there
        other = opened(tmp_path / "other", names)
        there = set(ids_of(other))
        # What it was doing as it was killed may have been done or not.
        assert {id for id, is_there in told.items() if (id in there) != is_there} <= {f"{number}-0"}
        told[f"{number}-0"] = f"{number}-0" in there
        other.close()


def test_threads_look_up_while_others_write(pair: tuple[KVStore, KVStore]) -> None:
    def look() -> None:
        for _ in range(40):
            for store in pair:
                found = store.names.lookup(NAMESPACE, ["n1", "n2"])
                # Both are named in one step.
                assert found[0] is None or found[1] is not None

    with ThreadPoolExecutor(3) as pool:
        looking = [pool.submit(look) for _ in range(3)]
        for number in range(20):
            pair[number % 2].name(NAMESPACE, [record("n1", number), record("n2", number)])
        for each in looking:
            each.result()


# What goes with what.


@pytest.mark.parametrize("how", ["deleted", "replaced"])
@pytest.mark.parametrize("by", [0, 1])
def test_what_has_seen_a_chunk_goes_with_it(names: str, pair: tuple[KVStore, KVStore], how: str, by: int) -> None:
    secret = replace(piece("a", "d", 0, 1), token_ids=(77001, 77002))
    readers = [behind(each, secret) for each in (piece("b", "d", 10, 2), piece("x", "e", 0, 3), record("l", 4))]
    pair[0].name(NAMESPACE, [secret, *readers])
    ids, laters = ["b", "x", "l"], [each.keys[-1] for each in readers]
    for store in pair:
        assert laters_of(store, ids) == [each.later for each in readers]
        for key in laters:
            store.put(key, make_kv(1))
        assert store.holds(laters) == [True] * 3
    assert is_said(names, "77001")
    if how == "deleted":
        pair[by].forget(NAMESPACE, ["a"])
    else:
        pair[by].name(NAMESPACE, [piece("a", "d", 0, 5)])
    assert not is_said(names, "77001")
    if names.startswith("sqlite"):
        assert b"77001" not in Path(names.removeprefix("sqlite:///")).read_bytes()
    for store in pair:
        assert laters_of(store, ids) == [None] * 3
        assert store.holds(laters) == [False] * 3


def test_heads_stay_on_their_machine(names: str, pair: tuple[KVStore, KVStore]) -> None:
    one, two = pair
    one.put_later(key_of(5), make_kv(5), NAMESPACE, {}, NodeRecord("head", key_of(5), "5" * 32, (77001, 77002)))
    one.settle()
    one.name(NAMESPACE, [piece("a", "d", 0, 1)])
    assert (ids_of(one), ids_of(two)) == (["a", "head"], ["a"])
    assert not is_said(names, "77001")


# Who comes, and who was away.


def test_who_comes_later_finds_everything(
    tmp_path: Path, names: str, pair: tuple[KVStore, KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_PAGE", 7)
    one, _ = pair
    one.name(NAMESPACE, [piece("a", "d", 0), piece("b", "d", 10, 1)], tenant="acme")
    one.name("other", [record("n1", 1)])
    one.forget("other", ["n1"])
    plain = [record(f"n{number}", number) for number in range(40)]
    # In whatever order they are read, some come before what they have seen.
    circle = [behind(each, plain[number - 1]) for number, each in enumerate(plain)]
    one.name(NAMESPACE, circle, tenant="acme")
    for folder in (tmp_path / "three", None):
        three = opened(folder, names)
        assert three.names.document(NAMESPACE, "d") == ["a", "b"]
        assert three.tenants() == ["acme"]
        assert three.names.ids("other") == []
        assert laters_of(three, [each.id for each in circle]) == [each.later for each in circle]
        three.close()


def test_clearing_is_for_all(pair: tuple[KVStore, KVStore]) -> None:
    one, two = pair
    one.name("a", [record("n1", 1)], tenant="acme")
    one.name("b", [piece("n2", "d", 0)])
    assert two.names.ids("a") == ["n1"]
    two.clear("acme")
    assert (one.names.ids("a"), one.names.ids("b")) == ([], ["n2"])
    one.clear()
    assert two.names.ids("b") == []


def test_an_index_that_was_lost_follows_again(tmp_path: Path, names: str) -> None:
    one, two = (opened(tmp_path / name, names) for name in ("one", "two"))
    one.name(NAMESPACE, [record("n1", 1), piece("a", "d", 0)])
    assert ids_of(two) == ["a", "n1"]
    two.close()
    for file in (tmp_path / "two").glob("index.sqlite*"):
        file.unlink()
    one.forget(NAMESPACE, ["n1"])
    two = opened(tmp_path / "two", names)
    assert ids_of(two) == ["a"]
    for store in (one, two):
        store.close()


def test_who_does_not_belong_together_is_refused(tmp_path: Path, names: str) -> None:
    alone = open_store(tmp_path / "alone", 10**6)
    alone.name(NAMESPACE, [record("n1", 1)])
    alone.close()
    with pytest.raises(StoreError, match="of its own"):
        opened(tmp_path / "alone", names)
    still = open_store(tmp_path / "alone", 10**6)
    assert still.names.ids(NAMESPACE) == ["n1"]
    still.close()
    opened(tmp_path / "shared", names).close()
    with pytest.raises(StoreError, match="CACHEBLEND_NAMES"):
        open_store(tmp_path / "shared", 10**6)


# A database that is out of reach, or has not what it had.


def test_out_of_reach_nothing_is_looked_up_and_nothing_changes(names: str, pair: tuple[KVStore, KVStore]) -> None:
    one, two = pair
    one.name(NAMESPACE, [record("n1", 1)])
    assert ids_of(two) == ["n1"]
    run_sql(names, "ALTER TABLE cacheblend_log RENAME TO elsewhere")
    for store in pair:
        with pytest.raises(RemoteUnavailableError):
            store.names.lookup(NAMESPACE, ["n1"])
    with pytest.raises(RemoteUnavailableError):
        one.forget(NAMESPACE, ["n1"])
    run_sql(names, "ALTER TABLE elsewhere RENAME TO cacheblend_log")
    assert ids_of(one) == ids_of(two) == ["n1"]
    assert one.forget(NAMESPACE, ["n1"]) == 1
    assert ids_of(two) == []


@pytest.mark.parametrize("loss", ["birth = 'another'", "position = position - 1"])
def test_a_database_that_lost_something_is_not_believed(names: str, pair: tuple[KVStore, KVStore], loss: str) -> None:
    one, _ = pair
    one.name(NAMESPACE, [record("n1", 1)])
    run_sql(names, f"UPDATE cacheblend_log SET {loss}")
    with pytest.raises(StoreError, match="lost"):
        one.names.lookup(NAMESPACE, ["n1"])
    with pytest.raises(StoreError, match="lost"):
        one.name(NAMESPACE, [record("n2", 2)])


@pytest.mark.parametrize("wrong", ['[["odd"]]', "{", '[[{"id": "n1", "key": "../../x"}, null]]'])
def test_what_a_database_says_is_checked(names: str, pair: tuple[KVStore, KVStore], wrong: str) -> None:
    one, two = pair
    one.name(NAMESPACE, [record("n1", 1)])
    run_sql(names, "UPDATE cacheblend_units SET state = :wrong", wrong=wrong)
    with pytest.raises(StoreError, match="n1"):
        two.names.lookup(NAMESPACE, ["n1"])


def test_another_version_is_refused(tmp_path: Path, names: str) -> None:
    opened(None, names).close()
    run_sql(names, "UPDATE cacheblend_log SET version = version + 1")
    with pytest.raises(StoreFormatError):
        opened(tmp_path / "kv", names)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "postgresql+nothing://host/db"])
def test_addresses_that_share_nothing_are_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError):
        opened(tmp_path / "kv", url)


def test_answers_do_without_the_database(tmp_path: Path, names: str) -> None:
    settings: dict[str, Any] = engine_settings(self_check=False, names=names)
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), store=tmp_path / "kv", **settings) as engine:
        chunks = [Chunk(words(12, number), f"c{number}") for number in range(2)]
        engine.add(chunks)
        prompt = BlendPrompt("t5 t6", chunks, "t7 t8")
        assert engine.prefill(prompt).report.hits == 2
        full = engine.prefill(prompt, blend=engine.blend.replace(enabled=False))
        run_sql(names, "DROP TABLE cacheblend_log")
        after = engine.prefill(prompt)
        assert (after.report.hits, after.report.fallback_reason is None) == (0, False)
        assert (after.logits - full.logits).abs().max() < 1e-4
