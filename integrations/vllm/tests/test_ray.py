"""Replicas with vLLM behind a front of Ray Serve, over a real Redis, against one engine over the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is installed in an environment of its own (make check-vllm)")
pytest.importorskip("ray", reason="Ray is not installed (extra ray)")

from cacheblend_lab.reference import WEIGHTS_DIR as WEIGHTS
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine import BlendEngine
from integrations.ray.tests.conftest import (
    CHAT,
    RedisServer,
    cluster,
    documents_of,
    put,
    question,
    ray_is_there,
    redis_of_ray,
    served,
    shared_in,
)
from integrations.serve.tests.process import LEAST
from integrations.vllm.tests.conftest import engine_answer

__all__ = ["cluster", "ray_is_there", "redis_of_ray"]

# Two vLLMs and a cluster take minutes to start.
pytestmark = [pytest.mark.timeout(600), pytest.mark.full]


@pytest.fixture(scope="module")
def shared(redis_of_ray: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return shared_in(redis_of_ray, tmp_path_factory.mktemp("names"))


@pytest.fixture(scope="module")
def client(cluster: None, shared: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    store = str(tmp_path_factory.mktemp("replicas"))
    args = {"backend": "vllm", "arguments": LEAST[1:], "store": store, "settings": shared}
    args |= {"min_replicas": 2, "max_replicas": 2}
    with served(args) as client:
        yield client


def test_replicas_answer_as_one_engine_over_the_same_store(client: httpx.Client, shared: dict[str, Any]) -> None:
    documents = documents_of(12)
    put(client, documents)
    config = EngineConfig(separator="\n\n", dtype="float32", **shared)
    seen: set[str] = set()
    with BlendEngine.from_pretrained(WEIGHTS, config=config) as engine:
        for names in [(each["document"],) for each in documents] + [("doc-0", "doc-3"), ("doc-5", "doc-1")]:
            body = question(*names, tokens=16, report=True)
            reply = client.post(CHAT, json=body)
            assert reply.status_code == 200, reply.text
            said, answer = reply.json(), engine_answer(engine, body)
            assert said["choices"][0]["message"]["content"] == answer.text
            # The KV is vLLM's, whichever replica computed it.
            [report] = said["blend"]
            assert (report["hits"], report["misses"]) == (4 * len(names), 0)
            assert all(chunk.hit for chunk in answer.report.chunks)
            seen.add(reply.headers["x-cacheblend-replica"])
    # Which one a document belongs to, is as random as their names.
    assert len(seen) == 2
