"""Uploads in the background."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_rag.codec import make_codec
from cacheblend_rag.store import open_remote
from cacheblend_rag.store.background import Offsite
from cacheblend_rag.store.chunkfile import EncodedChunk
from cacheblend_rag.store.remote import RemoteTier
from tests.store.kit import is_held, key_of, make_kv


class Gate:
    """Holds the first upload to a tier until it is opened."""

    def __init__(self, tier: RemoteTier, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()
        put = tier.put

        def wait_and_put(key: str, chunk: EncodedChunk) -> None:
            self.begun.set()
            self.opened.wait()
            put(key, chunk)

        monkeypatch.setattr(tier, "put", wait_and_put)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[RemoteTier]:
    pytest.importorskip("fsspec")
    tier = open_remote(f"file://{tmp_path}/share")
    yield tier
    tier.close()


@pytest.fixture
def gate(tier: RemoteTier, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(tier, monkeypatch)


def offsite(tier: RemoteTier, **settings: int) -> Offsite:
    return Offsite(tier, make_codec("native"), **settings)


def put(store: Offsite, *numbers: int) -> None:
    for number in numbers:
        store.put(key_of(number), make_kv(number))


def test_flush_means_uploaded(tier: RemoteTier) -> None:
    store = offsite(tier)
    store.flush()
    put(store, *range(20))
    store.flush()
    assert store.holds([key_of(number) for number in range(20)]) == [True] * 20
    assert is_held(store, 7)
    store.close()
    store.close()


def test_what_waits_is_bounded(tier: RemoteTier, gate: Gate) -> None:
    # A chunk of any size is taken where nothing waits.
    store = offsite(tier, waiting_bytes=make_kv(0).nbytes // 2)
    put(store, 0)
    gate.begun.wait()
    # What is on its way counts, too: its bytes are still in memory.
    put(store, 1)
    gate.opened.set()
    store.flush()
    put(store, 2)
    store.flush()
    assert tier.holds([key_of(number) for number in range(3)]) == [True, False, True]


def test_what_is_dropped_does_not_arrive_later(tier: RemoteTier, gate: Gate) -> None:
    store = offsite(tier)
    put(store, 0, 1, 2)
    gate.begun.wait()
    store.drop([key_of(1)])
    threading.Timer(0.02, gate.opened.set).start()
    store.drop([key_of(0)])
    store.flush()
    assert tier.holds([key_of(number) for number in range(3)]) == [False, False, True]


def test_an_outage_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("redis")
    store = offsite(open_remote("redis://:hunter2@127.0.0.1:1"))
    with caplog.at_level(logging.WARNING):
        put(store, *range(5))
        store.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "nothing is uploaded" in caplog.text and "hunter2" not in caplog.text


def test_the_thread_survives_what_is_not_foreseen(
    caplog: pytest.LogCaptureFixture, tier: RemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(key: str, chunk: EncodedChunk) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug")

    monkeypatch.setattr(tier, "put", broken)
    store = offsite(tier)
    put(store, 0, 1)
    store.flush()
    assert "a bug" in caplog.text
    assert tier.holds([key_of(0), key_of(1)]) == [False, True]
