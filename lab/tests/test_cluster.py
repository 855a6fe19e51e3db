"""The simulator against what can be worked out by hand, and against caches played through; costs fitted to scans."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cacheblend_lab.cluster.asking import store_corpus
from cacheblend_lab.cluster.caches import Capacities, LruCaches
from cacheblend_lab.cluster.comparison import Trial, compare_servers
from cacheblend_lab.cluster.cores import Cores
from cacheblend_lab.cluster.costs import CASES, Costs, Reads, TierCost, read_costs
from cacheblend_lab.cluster.measure import Scan, fit, measure_cores, stored_chunk_bytes
from cacheblend_lab.cluster.plan import Goal, plan, replicas_wanted
from cacheblend_lab.cluster.router import Router, homes_of
from cacheblend_lab.cluster.servers import Servers, cpu_s
from cacheblend_lab.cluster.simulation import Cluster, Load, simulate, simulate_steady
from cacheblend_lab.cluster.workload import Workload
from cacheblend_rag.errors import ConfigError
from tests.command import run
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
# Shares of chunks that the approximation may be off by, and the simulation of 12,000 requests with it.
_OFF_BY = 0.03


def test_costs_are_read_as_written(tmp_path: Path) -> None:
    costs = replace(FIXED, disk=TierCost(0.1), remote=TierCost(0.2, 5.0, 0.3, 0.4))
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(costs.to_dict()))
    assert read_costs(file) == costs
    file.write_text(json.dumps(costs.to_dict() | {"overlap": 2}))
    with pytest.raises(ConfigError, match="overlap"):
        read_costs(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_costs(tmp_path / "none.json")


def test_costs_are_fitted_to_what_took_as_long_as_they_say() -> None:
    rng = random.Random(3)
    true = Costs("test", "made up", 10.0, 0.004, 0.0003, 0.00002, 0.009, 0.002, 0.003)
    scans = []
    for _ in range(24):
        requests, size, steps = 24, rng.choice([1, 2, 4, 6]), rng.choice([0, 11])
        ram, disk, remote = rng.choice([(96, 0, 0), (0, 96, 0), (0, 0, 96), (192, 0, 0), (0, 192, 0), (0, 10, 182)])
        computed, reused = requests * rng.choice([20, 90]), 64 * (ram + disk + remote)
        took = requests * 0.004 + computed * 0.0003 + reused * 0.00002 + disk * 0.0008 + remote * 0.002
        took += requests / size * steps * 0.009 + requests * steps * 0.002 + requests * bool(remote) * 0.020
        cpu = 0.95 * took + requests * 0.003 + remote * 0.001
        noise = rng.uniform(0.99, 1.01)
        batches = requests / size
        steps_of = (requests, batches, requests * steps, batches * steps, computed, reused)
        scans.append(Scan(*steps_of, ram, disk, remote, requests if remote else 0, took * noise, cpu))
    costs = fit(scans, 10.0, "test")
    assert costs.decode_s_per_step == pytest.approx(true.decode_s_per_step, rel=0.1)
    assert costs.disk.read_s == pytest.approx(0.0008, rel=0.25)
    assert costs.remote.read_s == pytest.approx(0.002, rel=0.15)
    assert costs.remote.first_s == pytest.approx(0.020, rel=0.1)
    assert costs.busy_share == pytest.approx(0.95, rel=0.02)
    assert costs.prefill_s_per_token == pytest.approx(0.0003, rel=0.1)
    assert costs.beside_s_per_request + 4 * costs.remote.beside_s == pytest.approx(0.007, rel=0.35)


def test_the_command(tmp_path: Path) -> None:
    file, out = tmp_path / "costs.json", tmp_path / "plan.json"
    options = "--parameters 8e9 --kv-bytes-per-token 131072 --flops-per-s 1e15 --memory-bytes-per-s 3e12 "
    options += "--ram-bytes-per-s 5e10 --disk-bytes-per-s 6e9 --remote-bytes-per-s 1e10 --remote-read-s 0.001 "
    options += "--compute-share 0.5 --memory-share 0.5 --answers-at-once 4"
    run("bench cluster assume", "--out", file, "--name", "8B", *options.split())
    options = "--replicas 1,2 --rate 5 --ram 20GB --disk 50GB --answer-tokens 8 --requests 200"
    shown = run("bench cluster plan --corpus 20000", "--costs", file, *options.split(), "--json", out)
    assert "assumed" in shown.output
    written = json.loads(out.read_text())
    assert [row["replicas"] for row in written["rows"]] == [1, 2, 2]
    assert written["wanted"]["random"]["replicas"] == 1
    run("bench cluster near --costs qwen2-0.5b-cpu --corpus 20000 --replicas 2 --disks 0,1GB", "--json", out)
    rows = json.loads(out.read_text())["rows"]
    assert [row["router"] for row in rows] == ["affinity", "random"] * 2
    assert all(0 <= row["near_share"] <= 1 for row in rows)
    run("bench cluster near --costs none", code=2)


def test_the_exponent_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "retrieved.txt"
    log.write_text("".join(f"document-{rank}\n" * (1200 // (rank + 1)) for rank in range(50)))
    assert "--zipf 1.0" in run("bench cluster zipf", log, "--documents", 50).output
    run("bench cluster zipf", log, "--documents", 20, code=2)


def test_lru_is_a_list_of_the_last_used() -> None:
    rng = random.Random(1)
    caches = LruCaches(1, Capacities(ram_bytes=30, disk_bytes=70, remote_bytes=150), 10)
    used: list[int] = []
    far: list[int] = []
    for _ in range(3000):
        chunk = min(int(rng.expovariate(0.1)), 40)
        reads = caches.read(0, [chunk], [0])
        expected = (
            (1, 0, 0, 0)
            if chunk in used[-3:]
            else (0, 1, 0, 0)
            if chunk in used[-7:]
            else (0, 0, 1, 0)
            if chunk in far[-15:]
            else (0, 0, 0, 1)
        )
        if chunk not in used[-7:]:
            far = [each for each in far if each != chunk] + [chunk]
        used = [each for each in used if each != chunk] + [chunk]
        assert (reads.ram, reads.disk, reads.remote, reads.missing) == expected


def test_a_chunk_has_kv_of_its_own_for_the_first_place_of_a_prompt() -> None:
    for room, held in ((4, 2), (3, 0)):
        caches = LruCaches(1, Capacities(ram_bytes=10 * room, disk_bytes=0), 10)
        caches.read(0, [1, 2], [0, 0])
        assert caches.read(0, [1, 2], [0, 0]).ram == 2
        assert caches.read(0, [2, 1], [0, 0]).ram == 0
        # The four in turn.
        assert caches.read(0, [1, 2], [0, 0]).ram == held


def test_missing_chunks_are_read_behind_a_companion_and_their_document() -> None:
    costs = replace(FIXED, prefill_s_per_token=0.001)
    for chunk_tokens, companion in ((100, 100), (1000, 256)):
        took = costs.prefill_s(Reads(missing=2), chunk_tokens, 5)
        assert took == pytest.approx(0.010 + 0.001 * (5 + 2 * (chunk_tokens + companion + 64)))


@pytest.mark.parametrize("router", ["affinity", "random"])
@pytest.mark.parametrize("replicas", [1, 3, 8])
@pytest.mark.parametrize(("zipf", "remote"), [(0.6, None), (1.0, None), (0.9, 0.5)])
def test_che_against_caches_played_through(router: str, replicas: int, zipf: float, remote: float | None) -> None:
    workload = Workload(
        corpus_chunks=4000, chunks_per_document=4, chunk_tokens=16, zipf=zipf, chunks=4, documents=2, output_tokens=2
    )
    # Of one KV of every chunk.
    corpus_bytes = 4000 * 160
    capacities = Capacities(0.04 * corpus_bytes, 0.12 * corpus_bytes, None if remote is None else remote * corpus_bytes)
    costs = replace(FIXED, prefill_s_per_token=0.0001, reuse_s_per_token=0.00001, answers_at_once=4)
    cluster = Cluster(costs, replicas, capacities, router)
    # Not so many clients that load decides.
    load = Load(12_000, clients=replicas)
    played, steady = simulate(cluster, workload, load), simulate_steady(cluster, workload, load)
    assert steady.near_share == pytest.approx(played.near_share, abs=_OFF_BY)
    assert steady.ram_share == pytest.approx(played.ram_share, abs=_OFF_BY)
    assert steady.missing_share == pytest.approx(played.missing_share, abs=_OFF_BY)
    assert steady.requests_per_s == pytest.approx(played.requests_per_s, rel=0.1)


def test_homes_are_even_and_move_little() -> None:
    documents = np.arange(20_000)
    before, after = homes_of(documents, 7), homes_of(documents, 8)
    assert np.bincount(before).min() > 0.9 * 20_000 / 7
    # Who has moved has moved to the new replica.
    assert set(after[before != after]) == {7}


def test_router_prefers_home_up_to_its_bound() -> None:
    router = Router("affinity", 3, 2, np.random.default_rng(0))
    assert router.choose([1, 1, 2], [0, 2, 0]) == 1
    assert {router.choose([1, 1, 2], [0, 3, 0]) for _ in range(50)} <= {0, 1, 2}
    # Of two at random the less busy: never the busiest.
    assert {router.choose([1, 1, 2], [0, 3, 0]) for _ in range(50)} == {0, 2}
    with pytest.raises(ConfigError, match="not known"):
        Router("nearest", 3, 2, np.random.default_rng(0))


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
