"""Remote tiers that are down, slow, full, or hold something else than what was put."""

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.errors import ChunkReadError, RemoteUnavailableError, StoreError
from cacheblend_rag.store import open_remote
from cacheblend_rag.store.chunkfile import ChunkFile, EncodedChunk, encode_chunk
from cacheblend_rag.store.remote import RemoteTier
from tests.limits import wait_until
from tests.store.kit import key_of, make_kv, read, same
from tests.store.remote.conftest import RedisServer


def put(tier: RemoteTier, number: int, tokens: int = 6) -> None:
    tier.put(key_of(number), encode_chunk(key_of(number), make_kv(number, tokens=tokens)))


def is_right(tier: RemoteTier, number: int, tokens: int = 6) -> bool | None:
    source = tier.open(key_of(number))
    return source and same(read(ChunkFile(source, key_of(number))), make_kv(number, tokens=tokens))


def eventually(tier: RemoteTier, number: int) -> None:
    """Write and read as soon as the tier is tried again."""

    def works() -> bool:
        with suppress(RemoteUnavailableError):
            put(tier, number)
            return bool(is_right(tier, number))
        return False

    wait_until(works)


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Any]:
    import redis

    with redis.Redis(port=redis_server.port) as client:
        yield client


def test_slow(redis_server: RedisServer) -> None:
    tier = open_remote(redis_server.url(), read_timeout_s=0.2)
    put(tier, 1, tokens=1000)
    source = tier.open(key_of(1))
    assert source is not None
    file = ChunkFile(source, key_of(1))
    redis_server.signal(signal.SIGSTOP)
    with pytest.raises(RemoteUnavailableError):
        tier.holds([key_of(1)])
    with pytest.raises(ChunkReadError) as caught:
        file.layer(1)
    assert isinstance(caught.value.__cause__, RemoteUnavailableError)
    # Or it would be removed for others, too.
    assert not caught.value.damaged
    redis_server.signal(signal.SIGCONT)
    # The answers to what was asked before must not be taken for those to later questions.
    eventually(tier, 2)
    assert is_right(tier, 1, tokens=1000)
    assert same(read(file), make_kv(1, tokens=1000))


def test_full(redis_server: RedisServer, client: Any) -> None:
    tier = open_remote(redis_server.url())
    put(tier, 1)
    client.config_set("maxmemory", 1)
    with pytest.raises(RemoteUnavailableError):
        put(tier, 2, tokens=100)
    # Reads go on, and nothing of the chunk is left.
    assert is_right(tier, 1)
    assert tier.open(key_of(2)) is None
    client.config_set("maxmemory", 0)
    eventually(tier, 2)


def test_wrong_password_is_not_shown(redis_server: RedisServer, client: Any) -> None:
    client.config_set("requirepass", "right")
    tier = open_remote(redis_server.url("someone:hunter%2F2@"))
    with pytest.raises(RemoteUnavailableError) as caught:
        tier.open(key_of(1))
    assert "hunter" not in str(caught.value) and "hunter" not in tier.location
    assert tier.location == f"redis://127.0.0.1:{redis_server.port}/0"
    client.auth("right")
    eventually(open_remote(redis_server.url(":right@")), 1)


@pytest.mark.parametrize("where", ["layer", "shorter", "other type"])
def test_bytes_that_are_not_what_was_put(redis_server: RedisServer, client: Any, where: str) -> None:
    tier = open_remote(redis_server.url())
    put(tier, 1, tokens=100)
    (name,) = client.keys("*")
    source = tier.open(key_of(1))
    assert source is not None
    file = ChunkFile(source, key_of(1))
    if where == "layer":
        client.setrange(name, client.strlen(name) - 2000, b"\xaa\x55\xaa")
    elif where == "shorter":
        client.set(name, client.get(name)[:-1])
    else:
        client.delete(name)
        client.hset(name, "a", "b")
    with pytest.raises(RemoteUnavailableError if where == "other type" else ChunkReadError):
        is_right(tier, 1, tokens=100)
    with pytest.raises(ChunkReadError):
        file.verify()
    client.delete(name)
    put(tier, 1, tokens=100)
    assert is_right(tier, 1, tokens=100)


def test_a_chunk_that_is_too_large_for_one_value() -> None:
    pytest.importorskip("redis")
    with pytest.raises(StoreError):
        open_remote("redis://host").put(key_of(1), EncodedChunk((), b"", 2**30))


def test_entries_expire(redis_server: RedisServer, client: Any) -> None:
    tier = open_remote(redis_server.url(), ttl_s=1000)
    put(tier, 1)
    (name,) = client.keys("*")
    assert 990 < client.ttl(name) <= 1000
    client.expire(name, 10)
    put(tier, 1)
    assert 990 < client.ttl(name) <= 1000
    # Without an expiry of its own, another machine leaves that of the first as it is.
    put(open_remote(redis_server.url()), 1)
    assert 990 < client.ttl(name) <= 1000


def test_an_s3_endpoint_that_is_gone(s3_endpoint: str, tmp_path: Path) -> None:
    options = {"key": "a", "secret": "sEcReT", "endpoint_url": RedisServer(tmp_path).url().replace("redis", "http")}
    tier = open_remote("s3://bucket/gone", storage_options=options)
    with pytest.raises(RemoteUnavailableError) as caught:
        tier.open(key_of(1))
    assert "sEcReT" not in str(caught.value)
    missing = open_remote("s3://nowhere/x", storage_options={"key": "a", "secret": "b", "endpoint_url": s3_endpoint})
    with pytest.raises(RemoteUnavailableError):
        put(missing, 1)
