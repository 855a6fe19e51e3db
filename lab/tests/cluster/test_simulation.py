"""The simulator against what can be worked out by hand: one server's queue, shared cores, batches, the remote tier's link."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cacheblend_lab.cluster.asking import store_corpus
from cacheblend_lab.cluster.caches import Capacities
from cacheblend_lab.cluster.cases import CASES
from cacheblend_lab.cluster.comparison import Trial, compare_servers
from cacheblend_lab.cluster.cores import Cores, Sharing
from cacheblend_lab.cluster.costs import Costs, Reads, TierCost
from cacheblend_lab.cluster.measure import measure_cores, stored_chunk_bytes
from cacheblend_lab.cluster.plan import Goal, plan, replicas_wanted
from cacheblend_lab.cluster.servers import Servers, cpu_s
from cacheblend_lab.cluster.simulation import Cluster, Load, simulate, simulate_steady
from cacheblend_lab.cluster.workload import Workload
from cacheblend_rag.errors import ConfigError
from tests.store.remote.conftest import RedisServer, needs_redis

# Prefill alone: every request takes the same time, 10 ms, and no answer is longer than its first token.
FIXED = Costs(
    name="test",
    source="made up",
    stored_bytes_per_token=10.0,
    prefill_s_per_request=0.010,
    prefill_s_per_token=0.0,
    reuse_s_per_token=0.0,
    decode_s_per_step=0.002,
    decode_s_per_answer_step=0.0005,
    answers_at_once=1,
)
WORKLOAD = Workload(
    corpus_chunks=400, chunks_per_document=4, chunk_tokens=16, chunks=4, documents=2, question_tokens=0, output_tokens=1
)
ALL_FITS = Capacities(1e9, 1e9)


@pytest.mark.parametrize("busy", [0.3, 0.7])
def test_waiting_is_that_of_one_queue(busy: float) -> None:
    """Lindley's recursion over the same arrivals."""
    requests, seed = 4000, 3
    outcome = simulate(Cluster(FIXED, 1, ALL_FITS), WORKLOAD, Load(requests, rate=busy / 0.010, seed=seed))
    rng = np.random.default_rng(seed)
    WORKLOAD.draw(rng, requests)
    wait, times = 0.0, [0.010]
    for gap in rng.exponential(0.010 / busy, requests)[1:]:
        wait = max(wait + 0.010 - gap, 0.0)
        times.append(wait + 0.010)
    counted = times[requests // 5 : requests - 1]
    assert outcome.ttft_p50_s == pytest.approx(float(np.quantile(counted, 0.5)))
    assert outcome.ttft_p99_s == pytest.approx(float(np.quantile(counted, 0.99)))
    assert outcome.requests_per_s == pytest.approx(busy / 0.010, rel=0.05)
    assert outcome.busy_share == pytest.approx(busy, rel=0.05)


def test_replicas_with_devices_add_up_and_with_shared_cores_do_not() -> None:
    load = Load(4000, clients=40)
    rates = {}
    for replicas in (1, 2, 4):
        for name, cores in (("own", None), ("two", Cores((1.0, 2.0))), ("pair", Cores((1.0, 1.5)))):
            cluster = Cluster(FIXED, replicas, ALL_FITS, "random", cores=cores)
            rates[name, replicas] = simulate(cluster, WORKLOAD, load).requests_per_s
    for key, expected in {
        ("own", 1): 100, ("own", 2): 200, ("own", 4): 400,
        ("two", 1): 100, ("two", 2): 200, ("two", 4): 200,
        ("pair", 1): 100, ("pair", 2): 150, ("pair", 4): 150,
    }.items():  # fmt: skip
        assert rates[key] == pytest.approx(expected, rel=0.02), key


def test_work_beside_takes_cores_from_replicas() -> None:
    costs = replace(FIXED, beside_s_per_request=0.010)
    one = simulate(Cluster(costs, 1, ALL_FITS, cores=Cores((1.0, 2.0))), WORKLOAD, Load(2000, clients=8))
    four = simulate(Cluster(costs, 4, ALL_FITS, "random", cores=Cores((1.0, 2.0))), WORKLOAD, Load(2000, clients=32))
    assert one.requests_per_s == pytest.approx(100, rel=0.02)
    # Two cores, 20 ms a request.
    assert four.requests_per_s == pytest.approx(100, rel=0.03)


def test_answers_are_written_together() -> None:
    """Eight clients, batches of those that wait while others are answered: four and four."""
    costs = replace(FIXED, answers_at_once=8)
    workload = replace(WORKLOAD, output_tokens=11)
    outcome = simulate(Cluster(costs, 1, ALL_FITS), workload, Load(800, clients=8))
    # The first is answered alone, then seven, then one, and so on: 8 prefills, 10 steps of 1 and 10 of 7.
    expected = 8 / (8 * 0.010 + 10 * (0.002 + 0.0005) + 10 * (0.002 + 7 * 0.0005))
    assert outcome.requests_per_s == pytest.approx(expected, rel=0.03)
    joining = simulate(Cluster(replace(costs, joins_midway=True), 1, ALL_FITS), workload, Load(800, clients=8))
    assert joining.requests_per_s > 0.9 * outcome.requests_per_s


def test_far_chunks_cost_what_they_say_and_share_one_link() -> None:
    costs = replace(FIXED, remote=TierCost(0.001, 160 / 0.001))
    nothing_near = Capacities(0, 0)
    outcome = simulate(Cluster(costs, 1, nothing_near), WORKLOAD, Load(500, clients=2))
    # Four chunks of 160 bytes: 4 x (1 + 1) ms more.
    assert outcome.requests_per_s == pytest.approx(1 / 0.018, rel=0.02)
    assert outcome.near_share == 0
    linked = Cluster(costs, 4, nothing_near, "random", remote_bytes_per_s=4 * 160 * 50.0)
    outcome = simulate(linked, WORKLOAD, Load(1000, clients=40))
    assert outcome.requests_per_s == pytest.approx(50, rel=0.03)
    assert outcome.remote_bytes_per_s == pytest.approx(4 * 160 * 50, rel=0.03)


def test_loading_hides_behind_computing() -> None:
    costs = replace(FIXED, reuse_s_per_token=0.001, overlap=1.0, disk=TierCost(0.010))
    one = Reads(disk=2)
    assert costs.prefill_s(one, 16, 0, 0) == pytest.approx(0.010 + 0.032)
    assert replace(costs, overlap=0.0).prefill_s(one, 16, 0, 0) == pytest.approx(0.010 + 0.032 + 0.020)
    assert replace(FIXED, prefill_s_per_token=0.001).prefill_s(Reads(missing=1), 16, 5, 40) == pytest.approx(0.055)


def test_threads_do_what_was_measured_of_so_many() -> None:
    cores = Cores((1.0, 1.8, 1.5))
    for threads, together in ((0.5, 0.5), (1, 1), (1.5, 1.4), (2, 1.8), (2.5, 1.65), (3, 1.5), (8, 1.5)):
        assert cores.speed(threads) * threads == pytest.approx(together)


def test_nothing_is_slowed_alone() -> None:
    sharing, done = Sharing(Cores((1.0, 1.5))), list[str]()
    sharing.add(0.0, 1.0, lambda: done.append("a"))
    sharing.add(0.5, 1.0, lambda: done.append("b"))
    # From 0.5 on both go on at 0.75.
    assert sharing.next_at() == pytest.approx(0.5 + 0.5 / 0.75)
    sharing.finish(sharing.next_at())()
    assert sharing.next_at() == pytest.approx(0.5 + 0.5 / 0.75 + 0.5)
    sharing.finish(sharing.next_at())()
    assert done == ["a", "b"]
    assert sharing.next_at() == float("inf")


def test_affinity_brings_chunks_nearer() -> None:
    workload = Workload(corpus_chunks=4000, chunks_per_document=4, chunk_tokens=16, chunks=4, documents=1)
    cluster = Cluster(FIXED, 8, Capacities(4000 * 16, 16_000 * 16))
    near = {
        router: simulate_steady(replace(cluster, router=router), workload, Load(6000, clients=8)).near_share
        for router in ("affinity", "random")
    }
    assert near["affinity"] > 1.3 * near["random"]


def test_a_plan_finds_the_fewest_replicas() -> None:
    cluster = Cluster(FIXED, 1, ALL_FITS, queue_bound=2)
    rows = plan(cluster, WORKLOAD, (1, 4), 0.8, 2000)
    assert [(row.replicas, row.router) for row in rows] == [(1, "affinity"), (4, "affinity"), (4, "random")]
    assert rows[0].most_per_s == pytest.approx(100, rel=0.02)
    assert rows[0].outcome.requests_per_s == pytest.approx(80, rel=0.05)
    found = replicas_wanted(replace(cluster, router="random"), WORKLOAD, Goal(500, 1.0, 0.8), 100, 2000)
    # 500 are 80 % of 625.
    assert found is not None
    assert found.replicas in (6, 7, 8)
    assert replicas_wanted(cluster, WORKLOAD, Goal(500, 1.0, 0.8), 5, 2000) is None
    assert replicas_wanted(cluster, WORKLOAD, Goal(50, 0.001, 0.8), 4, 2000) is None


def test_what_cannot_be_is_refused() -> None:
    for load in ({"requests": 10}, {"requests": 10, "rate": 1, "clients": 1}, {"requests": 10, "rate": -1.0}):
        with pytest.raises(ConfigError):
            Load(**load)
    for powers in ((), (0.9,), (1.0, 3.0), (1.0, 0.0), (1.0, float("nan"))):
        with pytest.raises(ConfigError, match="powers"):
            Cores(powers)
    with pytest.raises(ConfigError):
        Cluster(FIXED, 0, ALL_FITS)
    with pytest.raises(ConfigError):
        Goal(1, 1, 1.5)


ASKED = Workload(
    corpus_chunks=80, chunks_per_document=4, chunk_tokens=64, zipf=0.8, chunks=4, documents=2, output_tokens=2
)
IN_RAM, ON_DISK, WORDS = 10, 25, 20


@pytest.mark.full
def test_what_is_near_at_real_servers_is_what_the_simulator_says(tmp_path: Path) -> None:
    needs_redis()
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        chunk_bytes = stored_chunk_bytes(tmp_path / "size", "reference", redis.url(), ASKED, WORDS)
        (tmp_path / "servers").mkdir()
        room = Capacities((IN_RAM + 0.5) * chunk_bytes, (ON_DISK + 0.5) * chunk_bytes)
        with Servers(tmp_path / "servers", "reference", 2, room, redis.url()) as servers:
            assert cpu_s(servers.process_ids) > cpu_s([])
            store_corpus(servers.urls, ASKED, WORDS)
            trial = Trial(ASKED, IN_RAM, ON_DISK, 2, 200, "affinity")
            cores = measure_cores(servers.urls, ASKED, IN_RAM, 2, 20)
            found = compare_servers(servers.urls, trial, CASES["qwen2-0.5b-cpu"], cores)
    finally:
        redis.kill()
    # Whole ones and caches of their own, or half of one.
    assert cores.powers[0] == 1 and 0.5 < cores.powers[1] <= 2
    assert found.measured.missing_share == 0
    assert 0.2 < found.measured.near_share < 0.9
    assert found.near_ratio == pytest.approx(1, abs=0.15)
