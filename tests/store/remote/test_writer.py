"""Uploads in the background."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store.chunkfile import ChunkFile, EncodedChunk, encode_chunk
from cacheblend_rag.store.remote import RemoteTier, open_remote
from cacheblend_rag.store.remote.offsite import RemoteWriter
from tests.store.kit import key_of, make_kv, read, same


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[RemoteTier]:
    pytest.importorskip("fsspec")
    tier = open_remote(f"file://{tmp_path}/share", back_off_s=1000, max_back_off_s=1000)
    yield tier
    tier.close()


def chunk(number: int) -> Callable[[], EncodedChunk]:
    return lambda: encode_chunk(key_of(number), make_kv(number))


def test_flush_means_uploaded(tier: RemoteTier) -> None:
    writer = RemoteWriter(tier)
    assert writer.flush()
    for number in range(20):
        assert writer.put(key_of(number), 1000, chunk(number))
    assert writer.flush()
    assert tier.holds([key_of(number) for number in range(20)]) == [True] * 20
    source = tier.open(key_of(7))
    assert source is not None and same(read(ChunkFile(source, key_of(7))), make_kv(7))
    stats = writer.stats()
    assert (stats.waiting, stats.waiting_bytes, stats.written, stats.failed, stats.refused) == (0, 0, 20, 0, 0)
    assert writer.close() and writer.close()
    with pytest.raises(StoreError, match="closed"):
        writer.put(key_of(1), 1, chunk(1))


def test_what_waits_is_bounded(tier: RemoteTier) -> None:
    writer = RemoteWriter(tier, max_waiting_bytes=2500)
    gate, begun = threading.Event(), threading.Event()

    def slow() -> EncodedChunk:
        begun.set()
        gate.wait()
        return chunk(0)()

    assert writer.put(key_of(0), 10_000, slow)
    begun.wait()
    # What is on its way counts, too: its bytes are still in memory.
    assert not writer.put(key_of(1), 1000, chunk(1))
    assert not writer.flush(timeout_s=0.01)
    assert writer.stats().waiting == 1
    gate.set()
    assert writer.flush()
    assert writer.put(key_of(1), 1000, chunk(1))
    assert writer.close()
    assert writer.stats().refused == 1
    assert tier.holds([key_of(0), key_of(1)]) == [True, True]


def test_close_gives_up_what_takes_too_long(tier: RemoteTier) -> None:
    writer = RemoteWriter(tier)
    gate, begun = threading.Event(), threading.Event()

    def slow() -> EncodedChunk:
        begun.set()
        gate.wait()
        return chunk(0)()

    writer.put(key_of(0), 1000, slow)
    writer.put(key_of(1), 1000, chunk(1))
    begun.wait()
    assert not writer.close(timeout_s=0.01)
    gate.set()
    assert writer.flush()
    assert tier.holds([key_of(0), key_of(1)]) == [True, False]


def test_forget(tier: RemoteTier) -> None:
    writer = RemoteWriter(tier)
    gate, begun = threading.Event(), threading.Event()

    def slow() -> EncodedChunk:
        begun.set()
        gate.wait()
        return chunk(0)()

    writer.put(key_of(0), 1000, slow)
    writer.put(key_of(1), 1000, chunk(1))
    begun.wait()
    writer.forget(key_of(1))
    threading.Timer(0.02, gate.set).start()
    writer.forget(key_of(0))
    # It has arrived, so that dropping it now is the last word.
    assert tier.holds([key_of(0), key_of(1)]) == [True, False]
    assert writer.close()


def test_an_outage_is_told_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    pytest.importorskip("redis")
    writer = RemoteWriter(open_remote("redis://:hunter2@127.0.0.1:1", back_off_s=1000, max_back_off_s=1000))
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            writer.put(key_of(number), 1000, chunk(number))
        assert writer.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "was not uploaded" in caplog.text and "hunter2" not in caplog.text
    assert writer.stats().failed == 5


def test_the_thread_survives_what_is_not_foreseen(caplog: pytest.LogCaptureFixture, tier: RemoteTier) -> None:
    def broken() -> EncodedChunk:
        raise RuntimeError("a bug")

    writer = RemoteWriter(tier)
    writer.put(key_of(0), 1000, broken)
    writer.put(key_of(1), 1000, chunk(1))
    assert writer.close()
    assert "a bug" in caplog.text
    assert tier.holds([key_of(1)]) == [True]
    assert (writer.stats().written, writer.stats().failed) == (1, 1)


def test_a_forked_child_begins_anew(tier: RemoteTier) -> None:
    writer = RemoteWriter(tier)
    gate, begun = threading.Event(), threading.Event()

    def slow() -> EncodedChunk:
        begun.set()
        gate.wait()
        return chunk(0)()

    writer.put(key_of(0), 1000, slow)
    begun.wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            writer.put(key_of(1), 1000, chunk(1))
            code = 0 if writer.flush(30) and tier.holds([key_of(1)])[0] and writer.close(30) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    assert writer.close()
    assert tier.holds([key_of(0), key_of(1)]) == [True, True]
