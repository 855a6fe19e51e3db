"""Costs: read back as written, refused where wrong, by formula, and fitted to scans."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from cacheblend_lab.cluster.costs import Costs, TierCost, read_costs
from cacheblend_lab.cluster.hardware import Hardware, assume_costs
from cacheblend_lab.cluster.measure import Scan, fit
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
