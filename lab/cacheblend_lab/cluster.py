"""A simulated cluster: requests arrive at random, a router chooses replicas, and these read from far away what they lack."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import quantiles
from typing import Any

import simpy

from cacheblend_rag.errors import ConfigError

__all__ = ["ROUTERS", "ClusterRow", "ClusterSetting", "draw_requests", "simulate"]

ROUTERS = ("nearest", "balanced", "round-robin")
"""The routers of `cacheblend_ray`, and one replica after the other."""

# What a document that no replica was asked for counts for where it belongs: less than any that one was asked for.
_AT_HOME = 0.1


@dataclass(frozen=True)
class ClusterSetting:
    """A corpus, its load, and the replicas that answer.

    Attributes
    ----------
    documents : int
        Documents of the corpus.
    zipf : float
        How unequally they are asked for: the n-th with a probability proportional to ``n ** -zipf``.
    per_request : int
        Documents that a request names.
    held : int
        Documents for which a replica has room near it, in RAM or on its disk; the least recently used one goes first.
    first_s : float
        Seconds of a replica until the first token, where all that a request names is near.
    far_s : float
        Seconds that each document adds that is read from the remote tier.
    answer_s : float
        Seconds from the first token to the last.
    at_once : int
        Answers that a replica writes at a time.
    queue_bound : int
        By how many requests the nearest replica's queue may be longer than the shortest.
    requests : int
        Requests that are counted, after half as many that fill the replicas.
    seed : int
        What is drawn follows from it.
    """

    documents: int = 10_000
    zipf: float = 0.85
    per_request: int = 2
    held: int = 500
    first_s: float = 0.2
    far_s: float = 0.1
    answer_s: float = 2.0
    at_once: int = 16
    queue_bound: int = 4
    requests: int = 4000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("documents", "per_request", "at_once"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("zipf", "held", "first_s", "far_s", "answer_s", "queue_bound"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 0, and finite")
        if self.per_request > self.documents:
            raise ConfigError(f"a request cannot name {self.per_request} of {self.documents} documents")
        if self.requests < 100:
            raise ConfigError(f"requests={self.requests} tell too little; give 100 or more")


@dataclass(frozen=True)
class ClusterRow:
    """What came of a load.

    Attributes
    ----------
    replicas, router, rate
        What was asked for.
    requests_per_s : float
        Answers per second; below the rate where the replicas cannot keep up.
    near_share : float
        Of the documents named, those that the replica had near it.
    far_per_s : float
        Documents read from the remote tier in a second, by all replicas.
    ttft_p50_s, ttft_p99_s : float
        Seconds from a request's arrival to its first token.
    """

    replicas: int
    router: str
    rate: float
    requests_per_s: float
    near_share: float
    far_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float


class _Replica:
    """A model that prefills one prompt after the other and writes answers together, and what lies near it."""

    def __init__(self, env: simpy.Environment, setting: ClusterSetting) -> None:
        self.room = setting.held
        self.held: OrderedDict[int, None] = OrderedDict()
        self.answers = simpy.Resource(env, setting.at_once)
        self.model = simpy.Resource(env, 1)
        self.queue = 0

    def read(self, named: Sequence[int]) -> int:
        """Return how many documents were not near; all of them are from then on."""
        far = sum(document not in self.held for document in named)
        for document in named:
            self.held[document] = None
            self.held.move_to_end(document)
        while len(self.held) > self.room:
            self.held.popitem(last=False)
        return far


@dataclass
class _Run:
    """One run; times are the environment's."""

    setting: ClusterSetting
    router: str
    rng: random.Random
    env: simpy.Environment
    replicas: list[_Replica]
    turn: int = 0
    # The replica that was asked last for each document.
    last: dict[int, int] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    far: int = 0

    def choose(self, named: Sequence[int]) -> _Replica:
        """Return the replica that a request goes to."""
        if self.router == "round-robin":
            self.turn += 1
            return self.replicas[self.turn % len(self.replicas)]
        if self.router == "nearest":
            scores = [0.0] * len(self.replicas)
            for document in named:
                last = self.last.get(document)
                scores[document % len(scores) if last is None else last] += _AT_HOME if last is None else 1
            ranked = range(len(scores))
            nearest = self.replicas[max(ranked, key=lambda number: (scores[number], -self.replicas[number].queue))]
            if nearest.queue <= min(each.queue for each in self.replicas) + self.setting.queue_bound:
                return nearest
        two = self.rng.sample(self.replicas, min(2, len(self.replicas)))
        return min(two, key=lambda each: each.queue)

    def load(
        self, gaps: Sequence[float], asked: Sequence[Sequence[int]], filling: int
    ) -> Generator[simpy.Event, Any, None]:
        """Let requests arrive with these gaps; the first ones only fill the replicas."""
        for number, (gap, named) in enumerate(zip(gaps, asked, strict=True)):
            yield self.env.timeout(gap)
            self.env.process(self.answer(named, number >= filling))

    def answer(self, named: Sequence[int], counts: bool) -> Generator[simpy.Event, Any, None]:
        came, setting, replica = self.env.now, self.setting, self.choose(named)
        self.last.update(dict.fromkeys(named, self.replicas.index(replica)))
        replica.queue += 1
        far = replica.read(named)
        with replica.answers.request() as place:
            yield place
            with replica.model.request() as model:
                yield model
                yield self.env.timeout(setting.first_s + far * setting.far_s)
            if counts:
                self.ttft_s.append(self.env.now - came)
                self.far += far
            yield self.env.timeout(setting.answer_s)
        replica.queue -= 1
        self.ends.append(self.env.now)


def simulate(setting: ClusterSetting, replicas: int, router: str, rate: float) -> ClusterRow:
    """Play a load of `rate` requests a second.

    Raises
    ------
    ConfigError
        If there is no such router, no replica, or no load.
    """
    if router not in ROUTERS:
        raise ConfigError(f"router {router!r} is unknown; choose one of {', '.join(ROUTERS)}")
    if replicas < 1 or not 0 < rate < float("inf"):
        raise ConfigError(f"{replicas} replicas at {rate} requests a second; give one or more, and a rate above 0")
    rng = random.Random(setting.seed)
    filling = setting.requests // 2
    asked = draw_requests(setting, rng, filling + setting.requests)
    # Drawn before what the router draws, so that all routers get the same load.
    gaps = [rng.expovariate(rate) for _ in asked]
    env = simpy.Environment()
    run = _Run(setting, router, rng, env, [_Replica(env, setting) for _ in range(replicas)])
    env.process(run.load(gaps, asked, filling))
    env.run()
    took_s = run.ends[-1] - run.ends[filling - 1]
    cuts = quantiles(run.ttft_s, n=100)
    return ClusterRow(
        replicas=replicas,
        router=router,
        rate=rate,
        requests_per_s=setting.requests / took_s,
        near_share=1 - run.far / (setting.requests * setting.per_request),
        far_per_s=run.far / took_s,
        ttft_p50_s=cuts[49],
        ttft_p99_s=cuts[98],
    )


def draw_requests(setting: ClusterSetting, rng: random.Random, count: int) -> list[tuple[int, ...]]:
    """Return the documents that each of `count` requests names."""
    ranks = list(range(setting.documents))
    sums = list(accumulate((rank + 1) ** -setting.zipf for rank in ranks))
    # Popular documents belong to any replica.
    rng.shuffle(ranks)
    asked = []
    for _ in range(count):
        named: dict[int, None] = {}
        while len(named) < setting.per_request:
            named[rng.choices(ranks, cum_weights=sums)[0]] = None
        asked.append(tuple(named))
    return asked
