"""A store over a remote tier, with uploads in the background."""

import logging
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import ChunkReadError
from cacheblend_rag.store import KVStore, open_remote
from cacheblend_rag.store.chunkfile import EncodedChunk
from cacheblend_rag.store.remote import RemoteTier
from tests.families import tiny_model, tiny_tokenizer, words
from tests.limits import wait_until
from tests.store.kit import add, files_of, key_of, make_kv, open_store, put, read, record, same
from tests.store.remote.conftest import RedisServer

Opener = Callable[[], RemoteTier]


def opened(folder: Path | None, tier: RemoteTier) -> KVStore:
    return open_store(folder, 10**6, remote=tier)


def test_two_machines_share(tmp_path: Path, opener: Opener) -> None:
    one, two = opened(tmp_path / "one", opener()), opened(tmp_path / "two", opener())
    add(one, 1)
    one.flush()
    assert two.holds([key_of(1), key_of(2)]) == [True, False]
    two.name("ns", [record("n1", 1)])
    reader = two.open(key_of(1))
    assert reader is not None and reader.tier not in ("ram", "disk")
    assert same(read(reader), make_kv(1))
    # What was read whole, and has a name here, is on this machine's disk then.
    two.flush()
    assert len(files_of(tmp_path / "two")) == 1
    again = two.open(key_of(1))
    assert again is not None and again.tier == "ram"


def test_what_is_deleted_while_it_is_read_is_not_kept(opener: Opener) -> None:
    store, other = opened(None, opener()), opened(None, opener())
    put(store, 1)
    store.flush()
    other.name("ns", [record("n1", 1)])
    reader = other.open(key_of(1))
    assert reader is not None
    reader.layer(0)
    other.forget("ns", ["n1"])
    # A folder's file stays readable; elsewhere the layers are gone.
    with suppress(ChunkReadError):
        reader.layer(1)
        reader.layer(2)
    reader.finish()
    assert (other.open(key_of(1)), other.stats().ram_bytes) == (None, 0)


def test_deleting_deletes_there_too(tmp_path: Path, opener: Opener) -> None:
    tier = opener()
    store = opened(tmp_path / "kv", opener())
    add(store, *range(4))
    store.flush()
    keys = [key_of(number) for number in range(4)]
    assert tier.holds(keys) == [True] * 4
    store.forget("ns", ["n0"])
    # Another text under the same id.
    store.name("ns", [record("n1", 2)])
    assert tier.holds(keys) == [False, False, True, True]
    store.discard(key_of(2))
    wait_until(lambda: tier.holds(keys) == [False, False, False, True])
    store.clear()
    assert tier.holds(keys) == [False] * 4
    assert store.open(key_of(3)) is None


def test_a_server_that_does_not_answer_is_asked_no_more_until_it_does(
    tmp_path: Path, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path, open_remote(redis_server.url()))
    add(store, 1, 2)
    store.flush()
    store.close()
    store = opened(tmp_path, open_remote(redis_server.url(), read_timeout_s=0.3))
    other, keys = opened(None, open_remote(redis_server.url(), read_timeout_s=0.3)), [key_of(1), key_of(2)]
    assert other.holds(keys) == [True, True]
    redis_server.signal(signal.SIGSTOP)
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            assert other.open(key_of(1)) is None
            assert other.holds(keys) == [False, False]
    assert len(caplog.records) == 1
    store.forget("ns", ["n2"])
    assert store.open(key_of(2)) is None
    redis_server.signal(signal.SIGCONT)
    wait_until(lambda: (reader := other.open(key_of(1))) is not None and same(read(reader), make_kv(1)))
    # The deletion that could not reach it is made up for.
    wait_until(lambda: other.holds(keys) == [True, False])


@pytest.mark.parametrize("turns", [6, pytest.param(60, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_answers_while_redis_is_killed_and_restarted(tmp_path: Path, redis_server: RedisServer, turns: int) -> None:
    """Every failure of the remote tier is a miss, and the answer that of an undisturbed run."""
    chance = random.Random(turns)
    tier = open_remote(redis_server.url())
    # There is room on disk for a single chunk: the others come from the remote tier.
    store = open_store(tmp_path, 0, 20_000, remote=tier)
    settings = engine_settings(recompute_ratio=0.3)
    chunks = [Chunk(words(16, number), f"n{number}") for number in range(4)]
    prompt = BlendPrompt(words(3, 10), [f"n{number}" for number in range(4)], words(5, 11))
    tiers: set[str | None] = set()
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), **settings, store=store) as engine:
        for chunk in chunks:
            engine.add([chunk])
            engine.flush()
        undisturbed = engine.prefill(prompt).logits
        for turn in range(turns):
            if turn % 2:
                redis_server.kill()
            for _ in range(chance.randrange(1, 4)):
                answer = engine.prefill(prompt)
                # What is a miss is encoded beside other chunks than at first.
                torch.testing.assert_close(answer.logits, undisturbed, atol=1e-4, rtol=0)
                tiers |= {chunk.tier for chunk in answer.report.chunks}
            if turn % 2:
                redis_server.start()
            engine.flush()
    assert {"disk", "redis", None} <= tiers


def test_what_is_dropped_does_not_arrive_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    begun, go_on = threading.Event(), threading.Event()
    tier, other = (open_remote(f"file://{tmp_path}/share") for _ in range(2))
    put = tier.put

    def wait_and_put(key: str, chunk: EncodedChunk) -> None:
        begun.set()
        go_on.wait()
        put(key, chunk)

    monkeypatch.setattr(tier, "put", wait_and_put)
    store = opened(None, tier)
    add(store, 0, 1, 2)
    begun.wait()
    store.forget("ns", ["n1"])
    threading.Timer(0.02, go_on.set).start()
    store.forget("ns", ["n0"])
    store.flush()
    assert other.holds([key_of(number) for number in range(3)]) == [False, False, True]
