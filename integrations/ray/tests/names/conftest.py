"""A server that keeps the names of several machines."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.store.remote.conftest import RedisServer, needs_redis


@pytest.fixture(scope="session")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    needs_redis()
    server = RedisServer(tmp_path_factory.mktemp("names"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def names(_server: RedisServer) -> str:
    """The address of a server without names."""
    with redis.Redis.from_url(_server.url()) as client:
        client.flushall()
    return _server.url()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that keeps what it acknowledges, and may be killed."""
    needs_redis()
    (tmp_path / "server").mkdir()
    server = RedisServer(tmp_path / "server", "--appendonly", "yes", "--appendfsync", "always")
    server.start()
    yield server
    server.kill()
