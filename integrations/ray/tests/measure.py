"""What Ray costs, and what the router gains: ``python -m integrations.ray.tests.measure warm|serve|router --out FILE``.

Redis is started for it; both are of this machine, whose processors all processes share.
"""

import argparse
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0"}

import httpx
import ray
import torch

from cacheblend_rag import EngineConfig
from cacheblend_ray import warm
from cacheblend_ray.rows import Columns
from cacheblend_ray.warming import Warmer, WarmJob
from integrations.ray.tests.conftest import CHAT, put, question, served
from integrations.serve.tests.process import ServerProcess
from tests.store.remote.conftest import RedisServer

CORES = len(os.sched_getaffinity(0))
PLACES = "harbour mill tower bridge market garden station library foundry quarry".split()
NAMES = "Mara Lind,Jonas Eide,Berit Solheim,Anders Vik,Ingrid Moen,Oskar Dahl".split(",")


def documents_of(count: int, chunks: int = 6) -> list[dict[str, Any]]:
    rng = random.Random(0)

    def chunk() -> str:
        sentences = [
            f"{rng.choice(NAMES)} keeps the {rng.choice(PLACES)} in year {rng.randrange(1800, 2000)}, "
            f"and pays {rng.randrange(10, 99)} crowns for the {rng.choice(PLACES)}."
            for _ in range(3)
        ]
        return " ".join(sentences)

    return [{"document": f"report-{number}", "chunks": [chunk() for _ in range(chunks)]} for number in range(count)]


class Shared:
    """An empty Redis, and the settings that name it."""

    def __init__(self, server: RedisServer, **settings: Any) -> None:
        self._server = server
        addresses = [f"redis://127.0.0.1:{server.port}/{number}" for number in (0, 1)]
        self.settings = {"remote": addresses[0], "names": addresses[1], **settings}

    def clear(self) -> None:
        import redis

        with redis.Redis.from_url(self._server.url()) as client:
            client.flushall()


# Warming


def warming(shared: Shared, count: int, rounds: int) -> dict[str, Any]:
    """Return how many documents a second one process with all cores encodes, and two of Ray's actors with half of them each."""
    documents = documents_of(count)
    rows: dict[str, list[dict[str, float]]] = {"one process": [], "2 actors": []}
    for _ in range(rounds):
        shared.clear()
        rows["one process"].append(_warm_here(documents, shared))
        shared.clear()
        rows["2 actors"].append(_warm_over_ray(documents, shared))
    best = {name: max(row["documents_per_s"] for row in found) for name, found in rows.items()}
    costs = {"best_documents_per_s": best, "ray_costs": 1 - best["2 actors"] / best["one process"]}
    return {"documents": count, "chunks": 6 * count, "rows": rows} | costs


def _warm_here(documents: list[dict[str, Any]], shared: Shared) -> dict[str, float]:
    torch.set_num_threads(CORES)
    started = time.perf_counter()
    worker = Warmer(WarmJob("reference", None, EngineConfig(**shared.settings), Columns(), 256))
    steps = []
    for begin in range(0, len(documents), 8):
        rows = documents[begin : begin + 8]
        worker({name: [row[name] for row in rows] for name in ("document", "chunks")})
        steps.append((time.perf_counter(), begin + len(rows)))
    return _rate(steps, started)


def _warm_over_ray(documents: list[dict[str, Any]], shared: Shared) -> dict[str, float]:
    steps = []
    started = time.perf_counter()
    summary = warm(
        documents,
        config=EngineConfig(**shared.settings),
        actors=2,
        progress=lambda done, total: steps.append((time.perf_counter(), done)),
    )
    assert (summary.documents, summary.failed) == (len(documents), [])
    return _rate(steps, started)


def _rate(steps: list[tuple[float, int]], started: float) -> dict[str, float]:
    """Return the rate between the first and the last that was done, so that starting is apart."""
    (first, before), (last, after) = steps[0], steps[-1]
    return {"documents_per_s": (after - before) / (last - first), "start_s": first - started, "all_s": last - started}


# Answering


def answering(shared: Shared, requests: int, rounds: int) -> dict[str, Any]:
    """Return how many requests a second one server with all cores answers, and two replicas with half of them each."""
    documents = documents_of(40)
    rows: dict[str, list[dict[str, float]]] = {"one server": [], "2 replicas": []}
    for _ in range(rounds):
        shared.clear()
        with one_server(shared) as address:
            rows["one server"].append(_load(address, documents, requests))
        shared.clear()
        with replicas(shared, 2, num_cpus=CORES / 2) as address:
            rows["2 replicas"].append(_load(address, documents, requests))
    best = {name: max(row["requests_per_s"] for row in found) for name, found in rows.items()}
    ray_costs = 1 - best["2 replicas"] / best["one server"]
    return {"requests": requests, "rows": rows, "best_requests_per_s": best, "ray_costs": ray_costs}


@contextmanager
def one_server(shared: Shared) -> Iterator[str]:
    variables = {f"CACHEBLEND_{name.upper()}": str(value) for name, value in shared.settings.items()}
    variables["OMP_NUM_THREADS"] = str(CORES)
    with tempfile.TemporaryDirectory() as folder, ServerProcess(Path(folder) / "log", variables=variables) as server:
        yield server.url


@contextmanager
def replicas(shared: Shared, count: int, **args: Any) -> Iterator[str]:
    given = {"settings": shared.settings, "min_replicas": count, "max_replicas": count, "num_cpus": 1}
    with served(given | args) as client:
        yield str(client.base_url)


def _load(address: str, documents: list[dict[str, Any]], requests: int, at_once: int = 8) -> dict[str, float]:
    rng = random.Random(1)
    with httpx.Client(base_url=address, timeout=300) as client:
        put(client, documents)
        asked = [asking(rng.sample(documents, 2), 16) for _ in range(requests)]
        # Each has what it needs once the first round is over.
        for body in asked[: 2 * at_once]:
            client.post(CHAT, json=body).raise_for_status()
        with ThreadPoolExecutor(at_once) as pool:
            started = time.perf_counter()
            times = list(pool.map(lambda body: _ask(client, body)[0], asked))
            seconds = time.perf_counter() - started
    return {"requests_per_s": requests / seconds, "p50_s": statistics.median(times)}


def asking(documents: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Return a request that names documents, and is told what was read from where."""
    return question(*(each["document"] for each in documents), tokens=tokens, report=True)


def _ask(client: httpx.Client, body: dict[str, Any]) -> tuple[float, httpx.Response]:
    started = time.perf_counter()
    reply = client.post(CHAT, json=body)
    reply.raise_for_status()
    return time.perf_counter() - started, reply


# Routing


def routing(shared: Shared, requests: int, corpus: int, share: float, zipf: float, each: int) -> dict[str, Any]:
    """Return from where three replicas read, with our router and with Ray Serve's own, on the same requests.

    Each has RAM for a `share` of the corpus, and no disk; requests name `each` documents, drawn by Zipf's law.
    """
    documents = documents_of(corpus)
    weights = [1 / (rank + 1) ** zipf for rank in range(corpus)]
    rows = {}
    for router in ("nearest", "balanced"):
        shared.clear()
        rng = random.Random(2)
        with replicas(shared, 3, num_cpus=0.5, router=router, stats_s=1) as address:
            rows[router] = _routed(address, documents, weights, requests, each, rng)
            print(router, rows[router], flush=True)
    near = {router: row["near_share"] for router, row in rows.items()}
    asked = {"requests": requests, "documents": corpus, "ram_share": share, "zipf": zipf, "documents_each": each}
    return asked | {"rows": rows, "near_times": near["nearest"] / near["balanced"]}


def _routed(
    address: str, documents: list[dict[str, Any]], weights: list[float], requests: int, each: int, rng: random.Random
) -> dict[str, Any]:
    tiers: dict[str, int] = {}
    why: dict[str, int] = {}
    ttft: list[float] = []
    lock = threading.Lock()

    def one(client: httpx.Client, body: dict[str, Any], counts: bool) -> None:
        reply = _ask(client, body)[1]
        report = reply.json()["blend"][0]
        if not counts:
            return
        with lock:
            ttft.append(report["ttft_s"])
            routed = reply.headers["x-cacheblend-routed"]
            why[routed] = why.get(routed, 0) + 1
            for chunk in report["chunks"]:
                tier = str(chunk["tier"])
                tiers[tier] = tiers.get(tier, 0) + 1

    def drawn() -> list[dict[str, Any]]:
        chosen: dict[int, None] = {}
        while len(chosen) < each:
            chosen[rng.choices(range(len(documents)), weights)[0]] = None
        return [documents[number] for number in chosen]

    with httpx.Client(base_url=address, timeout=300) as client:
        put(client, documents)
        asked = [asking(drawn(), 4) for _ in range(requests)]
        with ThreadPoolExecutor(3) as pool:
            # The first third fills RAM, and is not counted.
            list(pool.map(lambda body: one(client, body, False), asked[: requests // 3]))
            list(pool.map(lambda body: one(client, body, True), asked[requests // 3 :]))
    total = sum(tiers.values())
    near = sum(count for tier, count in tiers.items() if tier in ("ram", "disk", "device"))
    return {"near_share": near / total, "tiers": tiers, "ttft_p50_s": statistics.median(ttft), "routed": why}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["warm", "serve", "router"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, help="documents to warm, or requests")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--each", type=int, default=1, help="router: documents of a request")
    parser.add_argument("--corpus", type=int, default=120, help="router: documents there are")
    parser.add_argument("--share", type=float, default=0.2, help="router: the part of them that a replica's RAM holds")
    parser.add_argument("--zipf", type=float, default=0.9)
    given = parser.parse_args()
    with ExitStack() as stack:
        server = RedisServer(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        server.start()
        stack.callback(server.kill)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address="local",
                num_cpus=CORES if given.what == "warm" else CORES + 2,
                include_dashboard=False,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
        stack.callback(ray.shutdown)
        if given.what == "warm":
            figures = warming(Shared(server), given.count or 96, given.rounds)
        elif given.what == "serve":
            figures = answering(Shared(server), given.count or 120, given.rounds)
        else:
            ram_bytes = round(given.share * kv_bytes(documents_of(given.corpus)))
            shared = Shared(server, ram_bytes=ram_bytes)
            figures = routing(shared, given.count or 600, given.corpus, given.share, given.zipf, given.each)
    figures = {
        "command": " ".join(["python -m integrations.ray.tests.measure", *sys.argv[1:]]),
        "cores": CORES,
    } | figures
    text = json.dumps(figures, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


def kv_bytes(documents: list[dict[str, Any]]) -> int:
    from cacheblend_rag import BlendEngine

    with BlendEngine.from_pretrained("reference") as engine:
        assert engine.decoder is not None
        tokens = sum(len(engine.tokenizer(chunk)["input_ids"]) for each in documents for chunk in each["chunks"])
        return tokens * engine.decoder.kv_bytes_per_token


if __name__ == "__main__":
    main()
