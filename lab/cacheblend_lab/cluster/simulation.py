"""The simulator: requests arrive, are routed, read their chunks, wait for a replica, and are answered."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from cacheblend_lab.cluster.caches import Caches, Capacities, LruCaches
from cacheblend_lab.cluster.cores import Cores, Sharing
from cacheblend_lab.cluster.costs import Costs
from cacheblend_lab.cluster.replica import Replica, Request
from cacheblend_lab.cluster.router import Router, homes_of
from cacheblend_lab.cluster.steady import SteadyCaches
from cacheblend_lab.cluster.workload import Workload
from cacheblend_rag.errors import ConfigError

__all__ = ["Cluster", "Load", "Outcome", "nearness", "simulate", "simulate_steady"]

# Of a load, the part by which it is found what share of chunks are asked for at home; and requests at least.
_PART, _LEAST = 2, 4000
# Where chunks are is drawn apart from requests.
_CACHES_STREAM = 1
# Requests at the start of a run that find queues shorter than they will be.
_LEFT_OUT = 0.2


@dataclass(frozen=True)
class Cluster:
    """Replicas that answer.

    Attributes
    ----------
    costs : Costs
        Of a replica.
    replicas : int
        How many there are.
    capacities : Capacities
        Room for KV.
    router : {"affinity", "random"}
        How requests are routed.
    queue_bound : int
        With affinity, by how much a queue may be longer than the shortest.
    remote_bytes_per_s : float or None
        What the remote tier gives all replicas together; None is as much as they ask for.
    cores : Cores or None
        Cores that all replicas share; None where each has a device of its own.
    """

    costs: Costs
    replicas: int
    capacities: Capacities
    router: str = "affinity"
    queue_bound: int = 4
    remote_bytes_per_s: float | None = None
    cores: Cores | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.queue_bound < 0:
            raise ConfigError(
                f"{self.replicas} replicas with a bound of {self.queue_bound}; give 1 or more, and 0 or more"
            )
        if self.remote_bytes_per_s is not None and self.remote_bytes_per_s <= 0:
            raise ConfigError(f"remote_bytes_per_s={self.remote_bytes_per_s} must be above 0, or None")


@dataclass(frozen=True)
class Load:
    """Arrival of requests: at random moments with an average rate, or from clients that each ask when they are answered.

    Attributes
    ----------
    requests : int
        How many there are; the first fifth is played but not counted.
    rate : float or None
        Requests per second.
    clients : int or None
        Clients; one of the two is given.
    seed : int
        What is drawn follows from it.
    """

    requests: int
    rate: float | None = None
    clients: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.clients is None):
            raise ConfigError("give either a rate or a number of clients")
        if self.requests < 2 or (self.rate or self.clients or 0) <= 0:
            raise ConfigError(f"{self} is no load; give two requests or more, and a rate or clients above 0")


@dataclass(frozen=True)
class Outcome:
    """Outcome of a load.

    Attributes
    ----------
    requests_per_s : float
        Answers per second.
    ttft_p50_s, ttft_p99_s : float
        Seconds from a request's arrival to its first token.
    near_share, ram_share, missing_share : float
        Of the chunks of requests: those in the replica's RAM or on its disk; those in RAM; those computed since no tier has them.
    home_share : float
        Of the chunks: those that were asked for at the replica that they belong to.
    remote_bytes_per_s : float
        Read from the remote tier, by all replicas together.
    busy_share : float
        Of the replicas' time in which they answered, on average.
    """

    requests_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    near_share: float
    ram_share: float
    missing_share: float
    home_share: float
    remote_bytes_per_s: float
    busy_share: float


class _Run:
    """One run; what happens at a time is in one queue, work that is slowed by other work in another."""

    def __init__(self, cluster: Cluster, workload: Workload, load: Load, caches: Caches) -> None:
        self._cluster, self._workload, self._load, self._caches = cluster, workload, load, caches
        rng = np.random.default_rng(load.seed)
        asked = workload.draw(rng, load.requests)
        self._chunks = asked.chunks.tolist()
        self._homes = homes_of(asked.chunk_documents, cluster.replicas).tolist()
        self._router = Router(cluster.router, cluster.replicas, cluster.queue_bound, rng)
        gaps = rng.exponential(1 / load.rate, load.requests) if load.rate else np.zeros(load.requests)
        self._came = np.cumsum(gaps).tolist()
        self._now = 0.0
        self._happens: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._sharing = Sharing(cluster.cores)
        self._replicas = [
            Replica(cluster.costs, self._sharing, lambda: self._now, self._end) for _ in range(cluster.replicas)
        ]
        self._queues = [0] * cluster.replicas
        self._went_to = [0] * load.requests
        self._link_free_at = 0.0
        self._next = 0
        self._ended: list[tuple[float, Request]] = []
        self._at_home = 0

    def play(self) -> Outcome:
        load = self._load
        if load.clients is not None:
            for _ in range(min(load.clients, load.requests)):
                self._at(0.0, self._arrive)
        else:
            self._at(self._came[0], self._arrive)
        # A closed load ends with its last request sent, when queues begin to run dry.
        while self._happens or self._sharing.next_at() < float("inf"):
            work_at = self._sharing.next_at()
            if self._happens and self._happens[0][0] <= work_at:
                self._now, _, then = heapq.heappop(self._happens)
            else:
                self._now = work_at
                then = self._sharing.finish(work_at)
            then()
        return self._outcome()

    def _at(self, at: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._happens, (at, next(self._numbers), then))

    def _arrive(self) -> None:
        number = self._next
        if number >= self._load.requests:
            return
        self._next += 1
        if self._load.rate is not None and self._next < self._load.requests:
            self._at(self._came[self._next], self._arrive)
        homes, costs, workload = self._homes[number], self._cluster.costs, self._workload
        where = self._router.choose(homes, self._queues)
        self._went_to[number] = where
        self._queues[where] += 1
        self._at_home += sum(home == where for home in homes)
        reads = self._caches.read(where, self._chunks[number], homes)
        prefill_s = costs.prefill_s(reads, workload.chunk_tokens, workload.question_tokens)
        request = Request(number, self._now, prefill_s, workload.output_tokens, reads)
        beside_s = costs.beside_s(reads)
        # On a device of its own a replica's other work is done by cores that it has enough of.
        if beside_s and self._cluster.cores is not None:
            self._sharing.add(self._now, beside_s, lambda: self._fetch(where, request))
        else:
            self._at(self._now + beside_s, lambda: self._fetch(where, request))

    def _fetch(self, where: int, request: Request) -> None:
        """Let what is far through the remote tier's link, one request after the other."""
        rate = self._cluster.remote_bytes_per_s
        far_bytes = request.reads.remote * self._workload.chunk_tokens * self._cluster.costs.stored_bytes_per_token
        if rate is None or not far_bytes:
            self._replicas[where].take(request)
            return
        self._link_free_at = max(self._link_free_at, self._now) + far_bytes / rate
        self._at(self._link_free_at, lambda: self._replicas[where].take(request))

    def _end(self, request: Request) -> None:
        self._queues[self._went_to[request.number]] -= 1
        self._ended.append((self._now, request))
        if self._load.clients is not None:
            self._at(self._now, self._arrive)

    def _outcome(self) -> Outcome:
        load = self._load
        left_out = int(load.requests * _LEFT_OUT)
        # By when they ended: a rate is of answers, no matter whose. At the end of a closed load queues run dry.
        last = load.requests - (min(load.clients, load.requests // 4) if load.clients else 1)
        counted = self._ended[left_out:last]
        began, ended = self._ended[max(left_out - 1, 0)][0], counted[-1][0]
        took_s = max(ended - began, 1e-12)
        reads = [request.reads for _, request in counted]
        chunks = sum(each.chunks for each in reads)
        first = np.array([request.first_at - request.came_at for _, request in counted])
        far_bytes = (
            sum(each.remote for each in reads)
            * self._workload.chunk_tokens
            * self._cluster.costs.stored_bytes_per_token
        )
        return Outcome(
            requests_per_s=len(counted) / took_s,
            ttft_p50_s=float(np.quantile(first, 0.5)),
            ttft_p99_s=float(np.quantile(first, 0.99)),
            near_share=sum(each.near for each in reads) / chunks,
            ram_share=sum(each.ram for each in reads) / chunks,
            missing_share=sum(each.missing for each in reads) / chunks,
            home_share=self._at_home / (load.requests * self._workload.chunks),
            remote_bytes_per_s=far_bytes / took_s,
            busy_share=sum(each.busy_s for each in self._replicas) / (self._now * len(self._replicas)),
        )


def simulate(cluster: Cluster, workload: Workload, load: Load, *, holds_all: bool = True) -> Outcome:
    """Play a load with every chunk in its caches, which are empty at the start; for corpora of up to a million chunks.

    With `holds_all`, a remote tier without limit has the whole corpus at the start.
    """
    chunk_bytes = workload.chunk_tokens * cluster.costs.stored_bytes_per_token
    return _Run(
        cluster, workload, load, LruCaches(cluster.replicas, cluster.capacities, chunk_bytes, holds_all=holds_all)
    ).play()


def simulate_steady(cluster: Cluster, workload: Workload, load: Load) -> Outcome:
    """Play a load over caches as they are in the long run, by Che's approximation; for corpora of any size."""
    home_share = _home_share_without_load(cluster, workload, load)
    if cluster.router == "affinity" and cluster.replicas > 1:
        # A part of the load shows how often queues decide, which is what nearness depends on.
        part = replace(load, requests=max(load.requests // _PART, min(load.requests, _LEAST)))
        home_share = _steady_run(cluster, workload, part, home_share)[0].home_share
    outcome, caches = _steady_run(cluster, workload, load, home_share)
    # What was drawn of the requests is a sample; the shares of all are known.
    return replace(
        outcome, near_share=caches.near_share, ram_share=caches.ram_share, missing_share=caches.missing_share
    )


def nearness(cluster: Cluster, workload: Workload, seed: int = 0) -> SteadyCaches:
    """Return where chunks are in the long run if queues never decide where a request goes: nothing is played."""
    home_share = _home_share_without_load(cluster, workload, Load(_LEAST, clients=1, seed=seed))
    chunk_bytes = workload.chunk_tokens * cluster.costs.stored_bytes_per_token
    rng = np.random.default_rng((seed, _CACHES_STREAM))
    return SteadyCaches(workload, cluster.replicas, cluster.capacities, chunk_bytes, home_share, rng)


def _steady_run(cluster: Cluster, workload: Workload, load: Load, home_share: float) -> tuple[Outcome, SteadyCaches]:
    chunk_bytes = workload.chunk_tokens * cluster.costs.stored_bytes_per_token
    rng = np.random.default_rng((load.seed, _CACHES_STREAM))
    caches = SteadyCaches(workload, cluster.replicas, cluster.capacities, chunk_bytes, home_share, rng)
    return _Run(cluster, workload, load, caches).play(), caches


def _home_share_without_load(cluster: Cluster, workload: Workload, load: Load) -> float:
    """Return the share of chunks that are asked for at home if queues never decide."""
    if cluster.router == "random" or cluster.replicas == 1:
        return 1 / cluster.replicas
    asked = workload.draw(np.random.default_rng(load.seed), min(load.requests, 4000))
    router = Router("affinity", cluster.replicas, 0, np.random.default_rng(load.seed))
    queues = [0] * cluster.replicas
    at_home = 0
    for homes in homes_of(asked.chunk_documents, cluster.replicas).tolist():
        where = router.choose(homes, queues)
        at_home += sum(home == where for home in homes)
    return at_home / asked.chunks.size
