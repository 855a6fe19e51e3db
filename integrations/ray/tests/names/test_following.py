"""Stores of several machines that share names: what one acknowledges the next look-up of any other finds."""

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import RemoteUnavailableError, StoreError
from cacheblend_rag.keys import chunk_key, context_digest
from cacheblend_rag.store import KVStore, Later, NodeRecord, open_store
from cacheblend_ray import log
from cacheblend_ray.names import open_names
from tests.families import tiny_model, tiny_tokenizer, words
from tests.store.kit import key_of, make_kv, piece, record, start
from tests.store.remote.conftest import RedisServer
from tests.store.workers import name_together

NAMESPACE = "ns"


def opened(folder: Path | None, names: str, **options: Any) -> KVStore:
    return open_store(folder, 10**6, names=names, **options)


@pytest.fixture
def pair(tmp_path: Path, names: str) -> Iterator[tuple[KVStore, KVStore]]:
    with ExitStack() as stack:
        stores = [opened(tmp_path / name, names) for name in ("one", "two")]
        for store in stores:
            stack.callback(store.close)
        yield stores[0], stores[1]


def ids_of(store: KVStore) -> list[str]:
    return sorted(store.names.ids(NAMESPACE))


def test_what_one_names_the_other_finds(pair: tuple[KVStore, KVStore]) -> None:
    one, two = pair
    one.name(NAMESPACE, [record("n1", 1)])
    assert two.names.lookup(NAMESPACE, ["n1", "n2"]) == [record("n1", 1), None]
    two.name(NAMESPACE, [record("n1", 2)])
    assert one.names.lookup(NAMESPACE, ["n1"]) == [record("n1", 2)]


def test_what_prompts_brought_goes_with_a_deletion_elsewhere(pair: tuple[KVStore, KVStore]) -> None:
    one, two = pair
    one.name(NAMESPACE, [piece("a", "d", 0)])
    assert ids_of(two) == ["a"]
    met = NodeRecord("window", key_of(5), "5" * 32, (5,), source="d")
    two.put_later(key_of(5), make_kv(5), NAMESPACE, [met, record("loose", 5)])
    two.settle()
    assert ids_of(two) == ["a", "loose", "window"]
    # Of the one id the first machine knows nothing, of the other it knows the source.
    one.forget(NAMESPACE, ["loose", "a"], "")
    assert ids_of(two) == []
    assert two.holds([key_of(5)]) == [False]


def test_what_is_not_written_yet_goes_too(pair: tuple[KVStore, KVStore], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    one.name(NAMESPACE, [piece("a", "d", 0)])
    assert ids_of(two) == ["a"]
    is_over, write = threading.Event(), two._waiting._work
    monkeypatch.setattr(two._waiting, "_work", lambda key, miss: is_over.wait() and write(key, miss))
    met = NodeRecord("window", key_of(5), "5" * 32, (5,), source="d")
    two.put_later(key_of(5), make_kv(5), NAMESPACE, [met, record("loose", 5), record("other", 5)])
    two.put_later(key_of(6), make_kv(6), NAMESPACE, [NodeRecord("w", key_of(6), "6" * 32, (6,), source="d")])
    assert ids_of(two) == ["a", "loose", "other", "w", "window"]
    one.forget(NAMESPACE, ["loose", "a"], "")
    assert ids_of(two) == ["other"]
    is_over.set()
    two.settle()
    assert ids_of(two) == ["other"]
    assert two.holds([key_of(5), key_of(6)]) == [True, False]


def test_who_comes_later_finds_everything(tmp_path: Path, names: str, pair: tuple[KVStore, KVStore]) -> None:
    one, _ = pair
    one.name(NAMESPACE, [piece("a", "d", 0), piece("b", "d", 10, 1)], tenant="acme")
    one.name("other", [record("n1", 1)])
    one.forget("other", ["n1"])
    for folder, given in ((tmp_path / "three", names), (None, open_names(names))):
        three = open_store(folder, 10**6, names=given)
        assert three.names.document(NAMESPACE, "d") == ["a", "b"]
        assert three.tenants() == ["acme"]
        assert three.names.ids("other") == []
        three.close()


def behind(record: NodeRecord, other: NodeRecord) -> NodeRecord:
    """Return a record with KV that was read behind another one's text."""
    key = chunk_key(NAMESPACE, record.token_ids + record.separator, None, context_digest(other.token_ids))
    return replace(record, later=Later(key, other.token_ids, ((other.id, other.key),)))


@pytest.mark.parametrize("how", ["deleted", "replaced"])
@pytest.mark.parametrize("by", [0, 1])
def test_what_has_seen_a_chunk_goes_with_it(names: str, pair: tuple[KVStore, KVStore], how: str, by: int) -> None:
    secret = replace(piece("a", "d", 0, 1), token_ids=(77001, 77002))
    same, other, loose = piece("b", "d", 10, 2), piece("x", "e", 0, 3), record("l", 4)
    readers = [behind(each, secret) for each in (same, other, loose)]
    pair[0].name(NAMESPACE, [secret, *readers])
    ids, laters = ["b", "x", "l"], [each.keys[-1] for each in readers]
    for store in pair:
        assert [each and each.later for each in store.names.lookup(NAMESPACE, ids)] == [each.later for each in readers]
        for key in laters:
            store.put(key, make_kv(1))
        assert store.holds(laters) == [True] * 3
    with redis.Redis.from_url(names) as client:
        states = "cacheblend-rag:{names}:units"
        assert sum(b"77001" in state for state in client.hvals(states)) == 3
        if how == "deleted":
            pair[by].forget(NAMESPACE, ["a"])
        else:
            pair[by].name(NAMESPACE, [piece("a", "d", 0, 5)])
        assert not any(b"77001" in state for state in client.hvals(states))
    for store in pair:
        assert [each and each.later for each in store.names.lookup(NAMESPACE, ids)] == [None] * 3
        assert store.holds(laters) == [False] * 3


def test_what_only_prompts_brought_stays_on_its_machine(names: str, pair: tuple[KVStore, KVStore]) -> None:
    one, two = pair
    secret = NodeRecord("met", key_of(5), "5" * 32, (77001, 77002))
    one.name(NAMESPACE, [piece("a", "d", 0, 1), record("l", 2)])
    one.put_later(key_of(5), make_kv(5), NAMESPACE, [secret])
    # One was read behind what a prompt brought, and what a prompt brought behind one.
    one.put_later(key_of(6), make_kv(6), NAMESPACE, [behind(record("own", 6), record("l", 2))])
    one.settle()
    one.name(NAMESPACE, [behind(piece("b", "d", 10, 3), secret), behind(record("m", 4), record("l", 2))])
    [here] = one.names.lookup(NAMESPACE, ["b"])
    assert here is not None and here.later is not None
    assert [each and each.later for each in two.names.lookup(NAMESPACE, ["b"])] == [None]
    two.forget(NAMESPACE, ["l"])
    assert [each and each.later for each in one.names.lookup(NAMESPACE, ["own", "m"])] == [None, None]
    one.forget(NAMESPACE, ["a"])
    assert (ids_of(one), ids_of(two)) == (["b", "m", "met", "own"], ["b", "m"])
    with redis.Redis.from_url(names) as client:
        assert not any(b"77001" in state for state in client.hvals("cacheblend-rag:{names}:units"))


def test_who_comes_later_finds_what_all_were_read_behind(
    names: str, pair: tuple[KVStore, KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_UNITS_A_PAGE", 1)
    plain = [record(f"n{number}", number) for number in range(40)]
    # In whatever order they are read, some come before what they have seen.
    circle = [behind(each, plain[number - 1]) for number, each in enumerate(plain)]
    pair[0].name(NAMESPACE, circle)
    three = opened(None, names)
    found = three.names.lookup(NAMESPACE, [each.id for each in circle])
    assert [each and each.later for each in found] == [each.later for each in circle]
    three.close()


def test_who_missed(tmp_path: Path, names: str, pair: tuple[KVStore, KVStore], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair
    one.name(NAMESPACE, [record(f"n{number}", number) for number in range(3)])
    assert len(ids_of(two)) == 3
    monkeypatch.setattr(log, "_KEPT", 1)
    one.forget(NAMESPACE, ["n0"])
    # A server drops the oldest of its log some at a time.
    for number in range(300):
        one.name(NAMESPACE, [record("n1", number)])
    assert ids_of(two) == ["n1", "n2"]
    assert two.names.lookup(NAMESPACE, ["n1"]) == [record("n1", 299)]


def test_clearing_is_for_all(pair: tuple[KVStore, KVStore]) -> None:
    one, two = pair
    one.name("a", [record("n1", 1)], tenant="acme")
    one.name("b", [piece("n2", "d", 0)])
    assert two.names.ids("a") == ["n1"]
    two.clear("acme")
    assert (one.names.ids("a"), one.names.ids("b")) == ([], ["n2"])
    one.clear()
    assert two.names.ids("b") == []


def test_processes_of_one_machine_follow_together(tmp_path: Path, names: str, pair: tuple[KVStore, KVStore]) -> None:
    one, two = pair
    beside = opened(tmp_path / "one", names)
    two.name(NAMESPACE, [record("n1", 1)])
    assert ids_of(beside) == ids_of(one) == ["n1"]
    beside.forget(NAMESPACE, ["n1"])
    assert ids_of(one) == ids_of(two) == []
    beside.close()


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


def test_out_of_reach_nothing_is_looked_up_and_nothing_changes(tmp_path: Path, mortal: RedisServer) -> None:
    one, two = (opened(tmp_path / name, mortal.url()) for name in ("one", "two"))
    one.name(NAMESPACE, [record("n1", 1)])
    assert ids_of(two) == ["n1"]
    mortal.kill()
    for store in (one, two):
        with pytest.raises(RemoteUnavailableError):
            store.names.lookup(NAMESPACE, ["n1"])
    with pytest.raises(RemoteUnavailableError):
        one.forget(NAMESPACE, ["n1"])
    mortal.start()
    until = time.monotonic() + 30
    while True:
        try:
            assert ids_of(one) == ids_of(two) == ["n1"]
            break
        except RemoteUnavailableError:
            assert time.monotonic() < until
            time.sleep(0.1)
    assert one.forget(NAMESPACE, ["n1"]) == 1
    assert ids_of(two) == []
    one.close()
    two.close()


def test_a_server_that_lost_all_is_not_believed(names: str, pair: tuple[KVStore, KVStore]) -> None:
    one, _ = pair
    one.name(NAMESPACE, [record("n1", 1)])
    with redis.Redis.from_url(names) as client:
        client.flushall()
    with pytest.raises(StoreError, match="has lost what it had acknowledged, or is another one"):
        one.names.lookup(NAMESPACE, ["n1"])
    with pytest.raises(StoreError, match="has lost what it had acknowledged, or is another one"):
        one.name(NAMESPACE, [record("n2", 2)])


def test_a_server_that_lost_its_end_is_not_believed(tmp_path: Path, names: str, pair: tuple[KVStore, KVStore]) -> None:
    one, two = pair
    one.name(NAMESPACE, [record("n1", 1)])
    assert ids_of(two) == ["n1"]
    with redis.Redis.from_url(names) as client:
        kept = {key: client.dump(key) for key in client.scan_iter()}
        one.name(NAMESPACE, [record("n2", 2)])
        for key, value in kept.items():
            client.restore(key, 0, value, replace=True)
    # Who has not seen what was lost goes on.
    for number in (3, 4):
        two.name(NAMESPACE, [record(f"n{number}", number)])
    assert ids_of(two) == ["n1", "n3", "n4"]
    with pytest.raises(StoreError, match="has lost what it had acknowledged, or is another one"):
        one.names.lookup(NAMESPACE, ["n1"])


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


def test_what_others_add_while_a_store_is_cleared_is_found(pair: tuple[KVStore, KVStore]) -> None:
    one, two = pair
    two.name(NAMESPACE, [record("n1", 1)])
    assert ids_of(one) == ["n1"]
    # As between the last of the names that `clear` found, and what it does behind that.
    one._index.clear(None)
    assert ids_of(one) == ids_of(two) == ["n1"]


def test_a_store_with_names_of_its_own_does_not_join(tmp_path: Path, names: str) -> None:
    alone = open_store(tmp_path / "kv", 10**6)
    alone.name(NAMESPACE, [record("n1", 1)])
    alone.close()
    with pytest.raises(StoreError, match="has names of its own"):
        opened(tmp_path / "kv", names)
    still = open_store(tmp_path / "kv", 10**6)
    assert still.names.ids(NAMESPACE) == ["n1"]
    still.close()


def test_a_copy_of_shared_names_is_not_used_without_them(tmp_path: Path, names: str) -> None:
    opened(tmp_path / "kv", names).close()
    with pytest.raises(StoreError, match="out of date without their server"):
        open_store(tmp_path / "kv", 10**6)


def test_what_a_server_says_is_checked(tmp_path: Path, names: str, pair: tuple[KVStore, KVStore]) -> None:
    one, two = pair
    one.name(NAMESPACE, [record("n1", 1)])
    with redis.Redis.from_url(names) as client:
        [name] = client.hkeys("cacheblend-rag:{names}:units")
        for state, why in ((b'[2, "", [["odd"]]]', "cannot be read"), (b'["", null, [], []]', "format version")):
            client.hset("cacheblend-rag:{names}:units", name, state)
            with pytest.raises(StoreError, match=f"'n1' .*{why}"):
                two.names.lookup(NAMESPACE, ["n1"])


def test_answers_do_without_the_server(tmp_path: Path, mortal: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    settings = engine_settings(self_check=False, names=mortal.url())
    model = tiny_model("llama")
    with BlendEngine(model, tiny_tokenizer(), store=tmp_path / "kv", **settings) as engine:
        engine.add([Chunk(words(12, number), f"c{number}") for number in range(2)])
        prompt = BlendPrompt("t5 t6", [Chunk(words(12, 0), "c0"), Chunk(words(12, 1), "c1")], "t7 t8")
        assert engine.prefill(prompt).report.hits == 2
        full = engine.prefill(prompt, blend=engine.blend.replace(enabled=False))
        mortal.signal(signal.SIGSTOP)
        after = engine.prefill(prompt)
        assert (after.report.hits, after.report.fallback_reason is None) == (0, False)
        assert (after.logits - full.logits).abs().max() < 1e-4
        mortal.signal(signal.SIGCONT)
    assert [each.message for each in caplog.records if "the store cannot be used now" in each.message]


def test_threads_look_up_while_others_write(pair: tuple[KVStore, KVStore]) -> None:
    one, two = pair

    def look() -> None:
        for _ in range(40):
            for store in pair:
                found = store.names.lookup(NAMESPACE, ["n1", "n2"])
                # Both are named in one step.
                assert found[0] is None or found[1] is not None

    with ThreadPoolExecutor(3) as pool:
        looking = [pool.submit(look) for _ in range(3)]
        for number in range(20):
            (one, two)[number % 2].name(NAMESPACE, [record("n1", number), record("n2", number)])
        for each in looking:
            each.result()
