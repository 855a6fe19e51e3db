"""A cluster of this machine alone, with a Redis behind it, and a tiny random Llama with the reference tokenizer."""

import importlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cacheblend_lab.reference import load_tokenizer
from cacheblend_rag import BlendEngine, EngineConfig
from tests.families import tiny_reader
from tests.store.remote.conftest import RedisServer, free_port, needs_redis

# Of what a cluster is started in: one thread, like the tests themselves; no figures sent anywhere; and time to start on a busy
# machine.
VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
_START_S = 300

SETTINGS = {"disk_codec": "native"}


@pytest.fixture(scope="session")
def redis_of_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    needs_redis()
    server = RedisServer(tmp_path_factory.mktemp("redis"), "--maxmemory-policy", "noeviction")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def ray_is_there() -> None:
    """Import Ray, which warns of itself."""
    os.environ |= VARIABLES
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("ray", reason="Ray is not installed (extra ray)")
        importlib.import_module("ray.data")
        importlib.import_module("ray.serve")
        for name in ("api", "client"):
            # How long `serve.start` and `serve.run` wait for the proxy, which no variable says.
            importlib.import_module(f"ray.serve._private.{name}").HTTP_PROXY_TIMEOUT = _START_S  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def cluster(ray_is_there: None) -> Iterator[None]:
    """A cluster with more processors than there are, so that all that is small fits."""
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny Llama, or in its stead a real model's folder: ``CLUSTER_MODEL``."""
    if real := os.environ.get("CLUSTER_MODEL"):
        return real
    folder = tmp_path_factory.mktemp("model")
    tiny_reader(eos_token_id=None).save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return str(folder)


def shared_in(server: RedisServer, folder: Path) -> dict[str, Any]:
    """Return settings of what the machines of a cluster share: KV in a server, ids in a file."""
    return {"remote": server.url(), "names": f"sqlite:///{folder}/names.sqlite", **SETTINGS}


@pytest.fixture
def shared(redis_of_ray: RedisServer, tmp_path: Path) -> dict[str, Any]:
    """Settings of what the machines of a cluster share, which is empty."""
    import redis

    with redis.Redis.from_url(redis_of_ray.url()) as client:
        client.flushall()
    return shared_in(redis_of_ray, tmp_path)


@contextmanager
def served(args: dict[str, Any]) -> Iterator[httpx.Client]:
    """Serve on the cluster what the arguments say; yields a client that asks it."""
    from ray import serve

    from cacheblend_ray import build_app

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
    serve.run(build_app({"model": "reference"} | args))
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client
    serve.shutdown()


CHAT = "/v1/chat/completions"


def question(*documents: Any, stream: bool = False, tokens: int = 8, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Which gate is open?"}]
    said = {"messages": messages, "documents": list(documents), "max_tokens": tokens, "stream": stream}
    return said | {"temperature": 0} | fields


def put(client: httpx.Client, documents: list[dict[str, Any]]) -> None:
    for each in documents:
        client.put(f"/v1/documents/{each['document']}", json={"chunks": each["chunks"]}).raise_for_status()


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


Opener = Callable[..., BlendEngine]


@pytest.fixture
def open_one(model: str, shared: dict[str, Any]) -> Iterator[Opener]:
    """Opens engines of this process over what is shared."""
    opened: list[BlendEngine] = []

    def open_engine(store: Path | None = None, **settings: Any) -> BlendEngine:
        config = EngineConfig(**(shared | settings))
        opened.append(BlendEngine.from_pretrained(model, store=store, config=config))
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()


def documents_of(count: int, chunks: int = 4) -> list[dict[str, Any]]:
    """Return documents of a few short chunks each."""
    return [
        {
            "document": f"doc-{number}",
            "chunks": [
                f"Part {part} of report {number} says that gate {number * part} is open." for part in range(chunks)
            ],
        }
        for number in range(count)
    ]


def workers(title: str) -> list[int]:
    """Return the processes of this cluster whose command line, or title, begins so."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if " ".join(process.cmdline()).startswith(title):
                found.append(process.pid)
    return found
