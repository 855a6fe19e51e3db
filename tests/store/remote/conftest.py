"""Remote tiers, on the servers that really run them."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from cacheblend_rag.store import open_remote
from cacheblend_rag.store.remote import RemoteTier

_SERVER = shutil.which("redis-server") or shutil.which("valkey-server")


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class RedisServer:
    """A redis-server (or valkey-server) that keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, credentials: str = "") -> str:
        return f"redis://{credentials}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        assert _SERVER
        command = [_SERVER, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self._folder), "--enable-debug-command", "yes", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_port(self.port, self._process)

    def signal(self, number: int) -> None:
        assert self._process
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise TimeoutError("the server did not start")


def needs_redis() -> None:
    pytest.importorskip("redis", reason="redis-py is not installed (extra redis)")
    if not _SERVER:
        pytest.skip("neither redis-server nor valkey-server is installed")


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of the test's own, which it may kill."""
    needs_redis()
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server for tests that leave it as it is."""
    needs_redis()
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An S3 endpoint over HTTP: moto's server in a process of its own, with one bucket."""
    for package in ("s3fs", "moto", "flask"):
        if not find_spec(package):
            pytest.skip(f"{package} is not installed (extra dev)")
    import s3fs

    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_port(port, process)
    endpoint = f"http://127.0.0.1:{port}"
    s3fs.S3FileSystem(key="a", secret="b", endpoint_url=endpoint, skip_instance_cache=True).mkdir("bucket")
    yield endpoint
    process.kill()
    process.wait()


Opener = Callable[..., RemoteTier]


@pytest.fixture(params=["redis", "file", "memory", "s3"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Open the same empty place as often as it is called."""
    tiers: list[RemoteTier] = []
    space = os.urandom(6).hex()
    kind = request.param
    options: dict[str, object] = {}
    if kind == "redis":
        server: RedisServer = request.getfixturevalue("shared_redis")
        url = server.url()
    elif kind == "file":
        url = f"file://{tmp_path}/share"
    elif kind == "memory":
        url = f"memory://{space}"
    else:
        endpoint: str = request.getfixturevalue("s3_endpoint")
        url = f"s3://bucket/{space}"
        # A client of S3 reads megabytes of JSON before its first call, and this server is slow: seconds on a busy machine.
        limits = {"connect_timeout_s": 30.0, "read_timeout_s": 60.0}
        options = {"storage_options": {"key": "a", "secret": "b", "endpoint_url": endpoint}, **limits}

    def open_again(**settings: object) -> RemoteTier:
        tiers.append(open_remote(url, **{**options, **settings}))  # type: ignore[arg-type]
        return tiers[-1]

    yield open_again
    for tier in tiers:
        tier.close()
    if kind == "redis":
        import redis

        with redis.Redis.from_url(url) as client:
            client.flushall()
