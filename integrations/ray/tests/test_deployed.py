"""``serve deploy`` on a cluster that stays: it is scaled and changed while it answers, and the server of names is killed."""

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from integrations.ray.tests.conftest import CHAT, SETTINGS, VARIABLES, documents_of, events, put, question
from tests.limits import wait_until
from tests.store.remote.conftest import RedisServer, free_port, needs_redis

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

BIN = Path(sys.executable).parent
# Who has the token may tell the cluster what to run.
TOKEN = secrets.token_hex(32)
ENVIRONMENT = os.environ | VARIABLES | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_ADDRESS": ""}
DELETES, RESTARTS, UPDATES = 50, 10, 5
REPLICAS = 3


class Deployed:
    """The application on a cluster, as a file for ``serve deploy`` has it."""

    def __init__(self, folder: Path, args: dict[str, Any], dashboard: str) -> None:
        self._file = folder / "serve.yaml"
        self._args = args
        self._dashboard = dashboard
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def deploy(self, replicas: int, **args: Any) -> None:
        """Say how many replicas there should be, and what they should be given; returns before they are there."""
        scaling = {"min_replicas": replicas, "max_replicas": replicas, "target_ongoing_requests": 4}
        app = {
            "name": "cacheblend",
            "route_prefix": "/",
            "import_path": "cacheblend_ray:build_app",
            "args": {"model": "reference"} | self._args | args,
            "deployments": [{"name": "Replica", "autoscaling_config": scaling}],
        }
        http = {"host": "127.0.0.1", "port": self._port}
        self._file.write_text(json.dumps({"http_options": http, "applications": [app]}), encoding="utf-8")
        command = [str(BIN / "serve"), "deploy", str(self._file), "--address", self._dashboard]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)

    def replicas(self) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        told = httpx.get(f"{self._dashboard}/api/serve/applications/", headers=headers, timeout=30).json()
        app = told["applications"].get("cacheblend", {"deployments": {}})
        assert app.get("status") != "DEPLOY_FAILED", app
        replicas = app["deployments"].get("Replica", {"replicas": []})["replicas"]
        return {each["replica_id"]: each["state"] for each in replicas}

    def has(self, replicas: int) -> bool:
        return list(self.replicas().values()) == ["RUNNING"] * replicas

    def wait(self, replicas: int) -> None:
        """Wait until there are so many replicas, and all of them answer."""
        wait_until(lambda: self.has(replicas))

    def replicas_that_answer(self, client: httpx.Client, path: str, count: int) -> dict[str, Any]:
        """Return what each of so many replicas answers, by its name."""
        found: dict[str, Any] = {}

        def all_did() -> bool:
            reply = client.get(path).raise_for_status()
            found[reply.headers["x-cacheblend-replica"]] = reply.json()
            return len(found) == count

        wait_until(all_did)
        return found


@contextmanager
def head(folder: Path) -> Iterator[str]:
    """Start a cluster's head; yields the address of its dashboard."""
    dashboard = free_port()
    command = [str(BIN / "ray"), "start", "--head", "--block", f"--port={free_port()}", "--num-cpus=8"]
    command += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}", f"--temp-dir={folder}"]
    command += [f"--ray-client-server-port={free_port()}", "--disable-usage-stats"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    try:
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that has written what it acknowledges."""
    needs_redis()
    server = RedisServer(tmp_path_factory.mktemp("names"), "--appendonly", "yes", "--appendfsync", "always")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def deployed(
    model: str, redis_of_ray: RedisServer, names: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("deployed")
    settings = {"remote": redis_of_ray.url(), "names": names.url(), "drain_s": 20, **SETTINGS}
    args = {"model": model, "store": str(folder / "kv"), "settings": settings, "num_cpus": 0.5, "stats_s": 0.5}
    # A socket's path may be no longer than 107 bytes.
    short = Path("/tmp") / f"ray-{os.getpid()}"
    with head(short) as dashboard:
        deployed = Deployed(folder, args | {"max_replicas": REPLICAS}, dashboard)

        def is_up() -> bool:
            try:
                deployed.deploy(1)
            except subprocess.CalledProcessError:
                return False
            return True

        wait_until(is_up)
        deployed.wait(1)
        yield deployed


@pytest.fixture
def client(deployed: Deployed) -> Iterator[httpx.Client]:
    deployed.deploy(1)
    deployed.wait(1)
    with httpx.Client(base_url=deployed.url, timeout=60) as client:
        wait_until(lambda: client.get("/readyz").is_success)
        yield client


def test_deletes_while_replicas_start(deployed: Deployed, client: httpx.Client) -> None:
    documents = documents_of(20 * DELETES)
    put(client, documents[: 2 * DELETES])
    there = {each["document"] for each in documents[: 2 * DELETES]}
    gone: set[str] = set()
    rounds = 0
    while len(gone) < DELETES:
        rounds += 1
        deployed.deploy(REPLICAS)
        while not deployed.has(REPLICAS):
            name = there.pop()
            client.delete(f"/v1/documents/{name}").raise_for_status()
            gone.add(name)
            assert client.post(CHAT, json=question(name)).status_code == 404
            # Enough for some to be deleted in each state that a start goes through.
            time.sleep(0.5)
        listed = deployed.replicas_that_answer(client, "/v1/documents", REPLICAS)
        for told in listed.values():
            assert {each["id"] for each in told["data"]} == there
        for name in gone:
            assert client.post(CHAT, json=question(name)).status_code == 404
        for name in sorted(there)[:12]:
            [report] = client.post(CHAT, json=question(name, report=True)).raise_for_status().json()["blend"]
            # A replica that has just started has hits at once.
            assert (report["hits"], report["misses"]) == (4, 0)
        deployed.deploy(1)
        deployed.wait(1)
    print(f"{len(gone)} deletes while replicas started, {rounds} times")


def test_an_update_cuts_no_answer_off(deployed: Deployed, client: httpx.Client) -> None:
    documents = documents_of(6)
    put(client, documents)
    asked = [question(each["document"], tokens=200) for each in documents]
    whole = [client.post(CHAT, json=each).json()["choices"][0]["message"]["content"] for each in asked]
    is_over = threading.Event()
    answered: list[int] = []
    wrong: list[str] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        while not is_over.is_set():
            chosen = rng.randrange(len(asked))
            try:
                with client.stream("POST", CHAT, json=asked[chosen] | {"stream": True}) as reply:
                    if reply.status_code != 200:
                        wrong.append(f"{reply.status_code} {reply.read()!r}")
                        continue
                    told = list(events(reply))
            except httpx.HTTPError as error:
                wrong.append(repr(error))
                continue
            text = "".join(each["choices"][0]["delta"].get("content") or "" for each in told if "choices" in each)
            if text == whole[chosen] and not any("error" in each for each in told):
                answered.append(chosen)
            else:
                wrong.append(f"{chosen}: {told[-1]}")

    working = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for each in working:
        each.start()
    try:
        for update in range(UPDATES):
            before = deployed.replicas().keys()
            # Something that the replicas are given is another, so each is replaced.
            deployed.deploy(2, queue_bound=5 + update)
            wait_until(lambda before=before: deployed.has(2) and not before & deployed.replicas().keys())  # type: ignore[misc]
    finally:
        is_over.set()
        for each in working:
            each.join()
    assert wrong == []
    assert len(answered) > 4 * UPDATES
    print(f"{len(answered)} streams, {UPDATES} updates, none cut off")


def test_the_server_of_names_is_killed_again(deployed: Deployed, client: httpx.Client, names: RedisServer) -> None:
    """Nothing acknowledged is lost, nothing deleted comes back, and every request is answered or refused with a reason."""
    deployed.deploy(2)
    deployed.wait(2)
    is_over = threading.Event()
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    # By document: the text of its chunk, None where there is none; several where a refused request may have been done.
    there: list[dict[str, set[str | None]]] = [{} for _ in range(4)]

    def work(number: int) -> None:
        rng, mine = random.Random(number), there[number]
        while not is_over.is_set():
            name = f"own-{number}-{rng.randrange(5)}"
            could = mine.get(name, {None})
            chance = rng.random()
            wanted = None if chance < 0.2 else f"Gate {rng.randrange(100)} is open."
            try:
                if chance < 0.2:
                    reply = client.delete(f"/v1/documents/{name}")
                elif chance < 0.5:
                    reply = client.put(f"/v1/documents/{name}", json={"chunks": [wanted, "Nobody has the key."]})
                else:
                    reply = client.post(CHAT, json=question(name, tokens=2))
            except httpx.HTTPError as error:
                wrong.append(f"{name}: {error!r}")
                continue
            counts[f"{reply.request.method} {reply.status_code}"] += 1
            if chance < 0.5:
                if reply.status_code == 200 or (wanted is None and reply.status_code == 404):
                    mine[name] = {wanted}
                elif reply.status_code == 503 and reply.json()["error"]["message"]:
                    mine[name] = could | {wanted}
                else:
                    wrong.append(f"{reply.request.method} {name}: {reply.status_code} {reply.text}")
            elif reply.status_code == 200:
                if could == {None}:
                    wrong.append(f"{name} was deleted, and was answered from")
            elif not (reply.status_code == 404 and None in could) and not (
                reply.status_code == 503 and reply.json()["error"]["message"]
            ):
                wrong.append(f"{name}, {could}: {reply.status_code} {reply.text}")

    working = [threading.Thread(target=work, args=(number,)) for number in range(len(there))]
    for each in working:
        each.start()
    try:
        for _ in range(RESTARTS):
            time.sleep(3)
            names.kill()
            time.sleep(1)
            names.start()
        time.sleep(3)
    finally:
        is_over.set()
        for each in working:
            each.join()
    assert wrong == [], (len(wrong), wrong[:5])
    wait_until(lambda: client.get("/readyz").is_success)
    for name, could in (item for mine in there for item in mine.items()):
        status = client.post(CHAT, json=question(name, tokens=2)).status_code
        assert status in {404 if each is None else 200 for each in could}, name
    print(f"{RESTARTS} restarts: {dict(counts)}")
