"""Two replicas behind a front, on a real cluster over a real Redis and a database of ids, against one engine."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from cacheblend_rag import BlendEngine, BlendPrompt, EngineConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_ray import build_app
from cacheblend_ray.warming import Warmer
from cacheblend_serve import ServedEngine
from integrations.ray.tests.conftest import (
    CHAT,
    SETTINGS,
    RedisServer,
    documents_of,
    events,
    put,
    question,
    served,
    shared_in,
    workers,
)
from integrations.serve.tests.conftest import serving
from tests.limits import wait_until

# What a prompt takes over depends on the prompts that the same replica answered before it.
ALONE = SETTINGS | {"prefix_bytes": 0}


@pytest.fixture(scope="module")
def settings(redis_of_ray: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return shared_in(redis_of_ray, tmp_path_factory.mktemp("names"))


@pytest.fixture(scope="module")
def client(
    cluster: None, model: str, settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    store = str(tmp_path_factory.mktemp("replicas"))
    args = {"model": model, "store": store, "settings": ALONE | {"drain_s": 5}}
    args |= {"min_replicas": 2, "max_replicas": 2, "num_cpus": 0.5}
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            # As settings are exported where `serve run` is called, of which the machines that answer know nothing.
            for name in ("remote", "names"):
                patch.setenv(f"CACHEBLEND_{name.upper()}", settings[name])
            client = stack.enter_context(served(args))
        yield client


@pytest.fixture(scope="module")
def one(model: str) -> Iterator[httpx.Client]:
    with (
        BlendEngine.from_pretrained(model, config=EngineConfig(**ALONE)) as engine,
        serving(engine) as address,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        yield client


def test_replicas_answer_as_one_engine(client: httpx.Client, one: httpx.Client) -> None:
    documents = documents_of(16)
    put(client, documents)
    put(one, documents)
    seen: set[str] = set()
    # Which replica a document belongs to, is as random as their names.
    for names in [(f"doc-{number}",) for number in range(16)] + [("doc-0", "doc-3"), ("doc-5", "doc-1")]:
        asked = question(*names)
        ours, alone = client.post(CHAT, json=asked), one.post(CHAT, json=asked)
        assert ours.status_code == alone.status_code == 200, ours.text
        assert ours.json()["choices"] == alone.json()["choices"]
        assert ours.json()["usage"] == alone.json()["usage"]
        seen.add(ours.headers["x-cacheblend-replica"])
        assert ours.headers["x-cacheblend-routed"] == "near"
    assert len(seen) == 2
    assert client.get("/v1/models").json()["data"][0]["id"] == one.get("/v1/models").json()["data"][0]["id"]
    assert client.get("/readyz").status_code == 200


def test_a_document_goes_to_the_replica_that_has_it(client: httpx.Client) -> None:
    put(client, documents_of(6))
    for number in range(6):
        replies = [client.post(CHAT, json=question(f"doc-{number}", report=True)) for _ in range(4)]
        assert len({reply.headers["x-cacheblend-replica"] for reply in replies}) == 1
        assert {chunk["tier"] for reply in replies[1:] for chunk in reply.json()["blend"][0]["chunks"]} == {"ram"}


def test_a_delete_counts_for_all_at_once(client: httpx.Client) -> None:
    for round in range(4):
        name = f"gone-{round}"
        put(client, [{"document": name, "chunks": ["The gate is shut.", "Nobody has the key."]}])
        assert client.post(CHAT, json=question(name)).status_code == 200
        client.delete(f"/v1/documents/{name}").raise_for_status()
        assert client.post(CHAT, json=question(name)).status_code == 404
        # Asked of any replica, since it names nothing.
        for _ in range(6):
            assert name not in {each["id"] for each in client.get("/v1/documents").json()["data"]}


def test_answers_are_streamed(client: httpx.Client) -> None:
    put(client, documents_of(1))
    whole = client.post(CHAT, json=question("doc-0", tokens=24)).json()["choices"][0]["message"]["content"]
    with client.stream("POST", CHAT, json=question("doc-0", stream=True, tokens=24)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        parts = [event["choices"][0]["delta"].get("content") or "" for event in events(response)]
    assert "".join(parts) == whole
    assert len(parts) > 8


def test_who_leaves_ends_the_answer(client: httpx.Client) -> None:
    put(client, documents_of(1))
    with client.stream("POST", CHAT, json=question("doc-0", stream=True, tokens=1500)) as response:
        next(events(response))
        replica = response.headers["x-cacheblend-replica"]

    def is_idle() -> bool:
        # A replica answers one prompt of a model after the other.
        reply = client.post(CHAT, json=question("doc-0", tokens=2, report=True)).raise_for_status()
        return reply.headers["x-cacheblend-replica"] == replica and reply.json()["blend"][0]["queue_s"] < 1

    wait_until(is_idle)


def test_errors_are_those_of_a_server(client: httpx.Client, one: httpx.Client) -> None:
    for path, body in [(CHAT, question("no")), (CHAT, {"messages": []}), (CHAT, question(n=3)), ("/v1/nothing", {})]:
        ours, alone = client.post(path, json=body), one.post(path, json=body)
        assert (ours.status_code, ours.json()) == (alone.status_code, alone.json())
    assert client.post(CHAT, content=b"{" * 9_000_000).status_code == 413
    assert client.get("/v1/models", headers={"host": "elsewhere.example"}).status_code == 403


def test_an_engine_of_frameworks_is_served(client: httpx.Client, one: httpx.Client) -> None:
    put(client, documents_of(2))
    put(one, documents_of(2))
    with ServedEngine(str(client.base_url)) as ours, ServedEngine(str(one.base_url)) as alone:
        ids = ours.document("doc-1")
        assert ids == alone.document("doc-1")
        answers = [engine.generate(BlendPrompt("Read.", ids, "Which gate?"), 8) for engine in (ours, alone)]
        assert answers[0].text == answers[1].text
        assert answers[0].report.misses == 0
        assert "".join(ours.stream(BlendPrompt("Read.", ids, "Which gate?"), 8)) == answers[1].text


def test_what_was_warmed_is_served(client: httpx.Client, model: str, settings: dict[str, Any]) -> None:
    documents = [{"document": f"warm/{each['document']}", "chunks": each["chunks"]} for each in documents_of(6)]
    worker = Warmer(model, None, EngineConfig(**settings))
    done = worker({name: [each[name] for each in documents] for name in ("document", "chunks")})
    assert set(done["error"]) == {""}
    for each in documents:
        reply = client.post(CHAT, json=question(each["document"], report=True)).json()
        assert (reply["blend"][0]["hits"], reply["blend"][0]["misses"]) == (4, 0)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
def test_a_replica_is_killed_in_the_middle_of_a_stream(kills: int, client: httpx.Client) -> None:
    """Every request is answered, or refused with a reason; nothing that was stored is lost, and nothing deleted comes back."""
    put(client, documents_of(4))
    whole = [client.post(CHAT, json=question(f"doc-{number}")).json()["choices"] for number in range(4)]
    for _ in range(kills):
        put(client, [{"document": "gone", "chunks": ["The gate is shut."]}])
        wrong: list[str] = []

        def ask(number: int, wrong: list[str] = wrong) -> None:
            try:
                reply = client.post(CHAT, json=question(f"doc-{number % 4}"))
                is_right = reply.status_code == 200 and reply.json()["choices"] == whole[number % 4]
                if not is_right and not (reply.status_code == 503 and reply.json()["error"]["message"]):
                    wrong.append(reply.text)
            except httpx.HTTPError as error:
                wrong.append(repr(error))

        asking = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        endless = question("doc-0", stream=True, tokens=1500, ignore_eos=True)
        with client.stream("POST", CHAT, json=endless) as response:
            told = events(response)
            next(told)
            for each in asking:
                each.start()
            kill_replica(response.headers["x-cacheblend-replica"])
            [cut] = [event["error"]["message"] for event in told if "error" in event]
            assert cut
        # While another is started.
        wait_until(lambda: client.delete("/v1/documents/gone").status_code in (200, 404))
        for each in asking:
            each.join()
        assert wrong == []
        wait_until(lambda: len(workers("ray::ServeReplica:default:Replica")) >= 2)
        until, seen = time.monotonic() + 120, set[str]()
        while len(seen) < 2:
            assert time.monotonic() < until
            listed = client.get("/v1/documents")
            assert "gone" not in {each["id"] for each in listed.json()["data"]}
            assert {f"doc-{number}" for number in range(4)} <= {each["id"] for each in listed.json()["data"]}
            seen.add(listed.headers["x-cacheblend-replica"])
        assert client.post(CHAT, json=question("gone")).status_code == 404
        for number in range(4):
            assert client.post(CHAT, json=question(f"doc-{number}")).json()["choices"] == whole[number]


def kill_replica(name: str) -> None:
    """Kill the process of the replica that a reply named."""
    import ray

    ray.kill(ray.get_actor(f"SERVE_REPLICA::default#Replica#{name}", namespace="serve"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"modle": "reference"}, "modle"),
        ({"settings": {"remote": "memory://x"}}, "names"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"settings": {"ratio": 1}}, "ratio"),
    ],
)
def test_wrong_arguments_are_told(ray_is_there: None, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_app({"model": "reference"} | args)
