"""Costs: read back as written, refused where wrong, by formula, and fitted to scans."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cacheblend_lab.cluster.caches import Capacities, LruCaches
from cacheblend_lab.cluster.costs import Costs, TierCost, read_costs
from cacheblend_lab.cluster.hardware import Hardware, assume_costs
from cacheblend_lab.cluster.measure import Scan, fit
from cacheblend_lab.cluster.popularity import Popularity, fit_zipf, zipf_of_share
from cacheblend_lab.cluster.router import Router, homes_of
from cacheblend_lab.cluster.simulation import Cluster, Load, simulate, simulate_steady
from cacheblend_lab.cluster.workload import Workload
from cacheblend_rag.errors import ConfigError
from tests.command import run

HARDWARE = Hardware(
    name="8B",
    parameters=8e9,
    kv_bytes_per_token=131072,
    flops_per_s=1000e12,
    memory_bytes_per_s=3e12,
    ram_bytes_per_s=50e9,
    disk_bytes_per_s=6e9,
    remote_bytes_per_s=10e9,
    remote_read_s=0.001,
    compute_share=0.5,
    memory_share=0.5,
    stored_share=0.5,
)


def test_costs_are_read_as_written(tmp_path: Path) -> None:
    costs = replace(assume_costs(HARDWARE, 2000), disk=TierCost(0.1), remote=TierCost(0.2, 5.0, 0.3, 0.4))
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(costs.to_dict()))
    assert read_costs(file) == costs
    file.write_text(json.dumps(costs.to_dict() | {"overlap": 2}))
    with pytest.raises(ConfigError, match="overlap"):
        read_costs(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_costs(tmp_path / "none.json")


def test_a_tier_is_waited_for_once_a_request() -> None:
    tier = TierCost(0.001, 1e6, first_s=0.020)
    assert tier.seconds(0, 2000) == 0
    assert tier.seconds(1, 2000) == pytest.approx(0.023)
    assert tier.seconds(4, 2000) == pytest.approx(0.032)


def test_costs_by_formula() -> None:
    costs = assume_costs(HARDWARE, 2000)
    assert costs.prefill_s_per_token == pytest.approx(2 * 8e9 / 500e12)
    assert costs.decode_s_per_step == pytest.approx(16e9 / 1.5e12)
    assert costs.decode_s_per_answer_step == pytest.approx(2000 * 131072 / 1.5e12)
    assert costs.stored_bytes_per_token == 65536
    assert "assumed" in costs.source
    with pytest.raises(ConfigError, match="flops_per_s"):
        replace(HARDWARE, flops_per_s=0)


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


# Shares of chunks that the approximation may be off by, and the simulation of 12,000 requests with it.
_OFF_BY = 0.03

COSTS = Costs(
    name="test",
    source="made up",
    stored_bytes_per_token=10.0,
    prefill_s_per_request=0.001,
    prefill_s_per_token=0.0001,
    reuse_s_per_token=0.00001,
    decode_s_per_step=0.001,
    decode_s_per_answer_step=0.0001,
    answers_at_once=4,
)


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


@pytest.mark.parametrize("router", ["affinity", "random"])
@pytest.mark.parametrize("replicas", [1, 3, 8])
@pytest.mark.parametrize(("zipf", "remote"), [(0.6, None), (1.0, None), (0.9, 0.5)])
def test_che_against_caches_played_through(router: str, replicas: int, zipf: float, remote: float | None) -> None:
    workload = Workload(
        corpus_chunks=4000, chunks_per_document=4, chunk_tokens=16, zipf=zipf, chunks=4, documents=2, output_tokens=2
    )
    corpus_bytes = 4000 * 160
    capacities = Capacities(0.04 * corpus_bytes, 0.12 * corpus_bytes, None if remote is None else remote * corpus_bytes)
    cluster = Cluster(COSTS, replicas, capacities, router)
    # Not so many clients that load decides.
    load = Load(12_000, clients=replicas)
    played, steady = simulate(cluster, workload, load), simulate_steady(cluster, workload, load)
    assert steady.near_share == pytest.approx(played.near_share, abs=_OFF_BY)
    assert steady.ram_share == pytest.approx(played.ram_share, abs=_OFF_BY)
    assert steady.missing_share == pytest.approx(played.missing_share, abs=_OFF_BY)
    assert steady.requests_per_s == pytest.approx(played.requests_per_s, rel=0.1)


def test_all_is_near_where_all_fits_and_nothing_where_nothing_does() -> None:
    workload = Workload(corpus_chunks=400, chunks_per_document=4, chunk_tokens=16, chunks=4, documents=2)
    load = Load(2000, clients=4)
    for capacities, near in ((Capacities(1e9, 1e9), 1.0), (Capacities(0, 0), 0.0)):
        steady = simulate_steady(Cluster(COSTS, 2, capacities), workload, load)
        assert steady.near_share == pytest.approx(near)
        assert steady.missing_share == 0


def test_popularity_draws_by_its_law() -> None:
    popularity = Popularity(50_000, 0.9)
    drawn = popularity.draw(np.random.default_rng(0), 400_000)
    weights = np.arange(1, 50_001) ** -0.9
    weights /= weights.sum()
    assert drawn.min() == 0
    assert drawn.max() < 50_000
    for first in (1, 10, 500, 5000, 25_000):
        assert (drawn < first).mean() == pytest.approx(weights[:first].sum(), rel=0.02)
        assert popularity.share_of_first(first / 50_000) == pytest.approx(weights[:first].sum(), rel=0.02)


def test_exponents_are_found_again() -> None:
    popularity = Popularity(2000, 0.8)
    drawn = popularity.draw(np.random.default_rng(0), 200_000)
    assert fit_zipf(np.bincount(drawn, minlength=2000).tolist()) == pytest.approx(0.8, abs=0.01)
    assert zipf_of_share(0.03, Popularity(100_000, 0.85).share_of_first(0.03), 100_000) == pytest.approx(0.85, abs=0.01)
    with pytest.raises(ConfigError, match="no Zipf law"):
        zipf_of_share(0.5, 0.2, 1000)
    with pytest.raises(ConfigError, match="two documents"):
        fit_zipf([3])


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


def test_a_workload_that_cannot_be_is_refused() -> None:
    for wrong in ({"chunks": 5, "documents": 2}, {"chunks": 0}, {"corpus_chunks": 3, "chunks_per_document": 3}):
        with pytest.raises(ConfigError):
            Workload(**{"chunks_per_document": 3, "chunks": 4, "documents": 2, **wrong})
