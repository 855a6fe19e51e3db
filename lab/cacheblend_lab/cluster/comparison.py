"""Real servers on this machine beside what the simulator says of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cacheblend_lab.cluster.asking import Answered, Asker
from cacheblend_lab.cluster.caches import Capacities
from cacheblend_lab.cluster.cores import Cores
from cacheblend_lab.cluster.costs import Costs
from cacheblend_lab.cluster.servers import cpu_s, machine_s
from cacheblend_lab.cluster.simulation import Cluster, Load, Outcome, simulate
from cacheblend_lab.cluster.workload import Workload
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.tuning import usable_cores

__all__ = ["Comparison", "Counted", "Trial", "compare_servers", "simulated"]

_QUESTION_WORDS = 12


@dataclass(frozen=True)
class Trial:
    """Requests that real servers get.

    Attributes
    ----------
    workload : Workload
        The corpus and its prompts; how many tokens chunks, questions and answers have in truth is counted.
    in_ram, on_disk : int
        KVs of chunks that the RAM and the disk of each server hold; a chunk has two.
    clients_per_replica, requests : int
        Clients, each asking when it is answered; and requests in all.
    router : {"affinity", "random"}
        How requests are routed.
    queue_bound : int
        With affinity, by how much a queue may be longer than the shortest.
    seed : int
        What is drawn follows from it.
    """

    workload: Workload
    in_ram: int
    on_disk: int
    clients_per_replica: int
    requests: int
    router: str = "affinity"
    queue_bound: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Counted:
    """Outcome of a trial, its first fifth and its end left out.

    Attributes
    ----------
    requests_per_s : float
        Answers per second.
    near_share, ram_share, missing_share : float
        Of chunks, as in `Outcome`.
    batch_size : float
        Prompts answered together, on average over batches.
    context_tokens, computed_tokens, output_tokens : float
        Of a request, on average.
    """

    requests_per_s: float
    near_share: float
    ram_share: float
    missing_share: float
    batch_size: float
    context_tokens: float
    computed_tokens: float
    output_tokens: float


@dataclass(frozen=True)
class Comparison:
    """Both, for one number of replicas and one router.

    Attributes
    ----------
    replicas, router : int, str
        Which.
    measured, simulated : Counted, Outcome
        Both.
    others_share : float or None
        Share of the machine's cores that processes which have nothing to do with it took meanwhile; None where that is not known.
    """

    replicas: int
    router: str
    measured: Counted
    simulated: Outcome
    others_share: float | None = None

    @property
    def rate_ratio(self) -> float:
        """The simulated rate over the measured one."""
        return self.simulated.requests_per_s / self.measured.requests_per_s

    @property
    def near_ratio(self) -> float:
        """The simulated near share over the measured one; NaN where nothing was near."""
        return self.simulated.near_share / self.measured.near_share if self.measured.near_share else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Return both and their ratios as plain objects."""
        return asdict(self) | {"rate_ratio": self.rate_ratio, "near_ratio": self.near_ratio}


def compare_servers(
    urls: Sequence[str], trial: Trial, costs: Costs, cores: Cores, process_ids: Sequence[int] = ()
) -> Comparison:
    """Ask real servers, which have the corpus, and simulate them.

    With the process ids of the servers and of the remote tier, what others take of the cores is told too.
    """
    clients = trial.clients_per_replica * len(urls)
    if trial.requests < 4 * clients:
        raise ConfigError(f"{trial.requests} requests of {clients} clients say too little; ask {4 * clients} or more")
    asker = Asker(urls, trial.workload.output_tokens, _QUESTION_WORDS)
    began, own_s, all_s = time.perf_counter(), cpu_s(process_ids), machine_s()
    answers = asker.ask_workload(trial.workload, trial.requests, clients, trial.router, trial.queue_bound, trial.seed)
    others_s = (machine_s() - all_s) - (cpu_s(process_ids) - own_s)
    others_share = others_s / (usable_cores() * (time.perf_counter() - began)) if process_ids else None
    measured = _count(answers, clients)
    said = simulated(measured, trial, len(urls), costs, cores)
    return Comparison(len(urls), trial.router, measured, said, others_share)


def simulated(measured: Counted, trial: Trial, replicas: int, costs: Costs, cores: Cores) -> Outcome:
    """Return what the simulator says of a trial, whose tokens were counted."""
    workload = replace(
        trial.workload,
        chunk_tokens=round(measured.context_tokens / trial.workload.chunks),
        question_tokens=round(measured.computed_tokens),
        output_tokens=max(round(measured.output_tokens), 1),
    )
    chunk_bytes = workload.chunk_tokens * costs.stored_bytes_per_token
    # By number: chunks that differ in size a little are of one here.
    capacities = Capacities((trial.in_ram + 0.5) * chunk_bytes, (trial.on_disk + 0.5) * chunk_bytes)
    cluster = Cluster(costs, replicas, capacities, trial.router, trial.queue_bound, cores=cores)
    load = Load(trial.requests, clients=trial.clients_per_replica * replicas, seed=trial.seed)
    return simulate(cluster, workload, load)


def _count(answers: Sequence[Answered], clients: int) -> Counted:
    first, last = len(answers) // 5, len(answers) - clients
    part = answers[first:last]
    reads = [each.reads for each in part]
    chunks = sum(each.chunks for each in reads)
    return Counted(
        requests_per_s=len(part) / (part[-1].ended_at - answers[first - 1].ended_at),
        near_share=sum(each.near for each in reads) / chunks,
        ram_share=sum(each.ram for each in reads) / chunks,
        missing_share=sum(each.missing for each in reads) / chunks,
        batch_size=len(part) / sum(1 / each.batch_size for each in part),
        context_tokens=sum(each.context_tokens for each in part) / len(part),
        computed_tokens=sum(each.computed_tokens for each in part) / len(part),
        output_tokens=sum(each.output_tokens for each in part) / len(part),
    )
