"""Planning: how many replicas a load wants, and what each size of a cluster carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from cacheblend_lab.cluster.router import ROUTERS
from cacheblend_lab.cluster.simulation import Cluster, Load, Outcome, simulate_steady
from cacheblend_lab.cluster.workload import Workload
from cacheblend_rag.errors import ConfigError

__all__ = ["Goal", "PlanRow", "most_per_s", "plan", "replicas_wanted"]

# Clients over answers that may be written at once, so that some always wait; and how many answers of each a run has.
_CROWD = 1.25
_ROUNDS = 5
# By how much more replicas are tried first than one alone says; nearness and chance make them differ by less.
_GUESS_OVER = 1.15


@dataclass(frozen=True)
class Goal:
    """Goal for a cluster.

    Attributes
    ----------
    requests_per_s : float
        Requests that arrive per second on average.
    ttft_p99_s : float
        Seconds within which 99 of 100 have their first token.
    load_share : float
        The share that arrives, at most, of what the cluster answers when every replica always has some waiting: the rest is for
        busier moments, and for a replica that is gone.
    """

    requests_per_s: float
    ttft_p99_s: float
    load_share: float = 0.8

    def __post_init__(self) -> None:
        if min(self.requests_per_s, self.ttft_p99_s) <= 0 or not 0 < self.load_share < 1:
            raise ConfigError(f"{self} is no goal; rate and time must be above 0, the share between 0 and 1")


@dataclass(frozen=True)
class PlanRow:
    """One size of a cluster, with one router.

    Attributes
    ----------
    router : str
        The router.
    replicas : int
        How many there are.
    most_per_s : float
        Requests per second when every replica always has some waiting.
    outcome : Outcome
        What comes of requests at random moments, of `Goal.load_share` of that rate or, in `replicas_wanted`, of the rate wanted.
    """

    router: str
    replicas: int
    most_per_s: float
    outcome: Outcome


def plan(
    cluster: Cluster,
    workload: Workload,
    sizes: Sequence[int],
    load_share: float,
    requests: int,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> list[PlanRow]:
    """Return a row for each size and router; the cluster's own replicas and router do not matter.

    Each run has at least `requests` requests, and more where these would be over before queues are as they will be.
    """
    rows = []
    for replicas in sizes:
        for router in ROUTERS if replicas > 1 else ROUTERS[:1]:
            say(f"{replicas} replicas, {router}")
            sized = replace(cluster, replicas=replicas, router=router)
            most = most_per_s(sized, workload, requests, seed)
            outcome = _at_rate(sized, workload, load_share * most, requests, seed)
            rows.append(PlanRow(router, replicas, most, outcome))
    return rows


def replicas_wanted(
    cluster: Cluster,
    workload: Workload,
    goal: Goal,
    most_replicas: int,
    requests: int,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> PlanRow | None:
    """Return the fewest replicas that do what is wanted, and what comes of it; None where not even the most do.

    More replicas are taken to be never worse, so that halving finds the fewest.
    """

    def tried(replicas: int) -> PlanRow | None:
        say(f"{goal.requests_per_s:g} a second with {replicas} replicas, {cluster.router}")
        sized = replace(cluster, replicas=replicas)
        most = most_per_s(sized, workload, requests, seed)
        if goal.requests_per_s > goal.load_share * most:
            return None
        outcome = _at_rate(sized, workload, goal.requests_per_s, requests, seed)
        return PlanRow(cluster.router, replicas, most, outcome) if outcome.ttft_p99_s <= goal.ttft_p99_s else None

    # One replica says about how many are wanted, and all that is tried lies near.
    alone = most_per_s(replace(cluster, replicas=1), workload, requests, seed)
    low, high = 0, max(1, min(ceil(_GUESS_OVER * goal.requests_per_s / (goal.load_share * alone)), most_replicas))
    best = tried(high)
    while best is None:
        if high >= most_replicas:
            return None
        low, high = high, min(2 * high, most_replicas)
        best = tried(high)
    while high - low > 1:
        # The first try is near the least that there can be.
        middle = (low + high) // 2 if low else max(1, min(high - 1, int(high / _GUESS_OVER**2)))
        found = tried(middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return best


def most_per_s(cluster: Cluster, workload: Workload, requests: int, seed: int = 0) -> float:
    """Return the requests per second that a cluster answers when every replica always has some waiting."""
    clients = ceil(_CROWD * cluster.replicas * cluster.costs.answers_at_once)
    return simulate_steady(
        cluster, workload, Load(max(requests, _ROUNDS * clients), clients=clients, seed=seed)
    ).requests_per_s


def _at_rate(cluster: Cluster, workload: Workload, rate: float, requests: int, seed: int) -> Outcome:
    """Return what comes of a rate, in a run of several times as long as an answer takes with the most others."""
    longest_s = cluster.costs.decode_s(cluster.costs.answers_at_once, workload.output_tokens)
    return simulate_steady(
        cluster, workload, Load(max(requests, ceil(_ROUNDS * rate * longest_s)), rate=rate, seed=seed)
    )
