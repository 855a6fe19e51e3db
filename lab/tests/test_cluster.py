"""The simulated cluster against what can be worked out by hand."""

import random
from dataclasses import replace
from pathlib import Path
from statistics import quantiles

import pytest

from cacheblend_lab.cluster import ROUTERS, ClusterSetting, draw_requests, simulate
from cacheblend_rag.errors import ConfigError
from tests.command import read_rows, run

# Every request takes the replica's model for 10 ms, and nothing is read from far away.
FIXED = ClusterSetting(documents=10, per_request=1, held=10, first_s=0.01, far_s=0.0, answer_s=0.0, seed=3)


@pytest.mark.parametrize("busy", [0.3, 0.7])
def test_waiting_is_that_of_one_queue(busy: float) -> None:
    """Lindley's recursion over the same arrivals."""
    rate = busy / FIXED.first_s
    row = simulate(FIXED, 1, "nearest", rate)
    rng = random.Random(FIXED.seed)
    asked = draw_requests(FIXED, rng, 6000)
    wait, times = 0.0, [FIXED.first_s]
    for gap in [rng.expovariate(rate) for _ in asked][1:]:
        wait = max(wait + FIXED.first_s - gap, 0.0)
        times.append(wait + FIXED.first_s)
    cuts = quantiles(times[2000:], n=100)
    assert (row.ttft_p50_s, row.ttft_p99_s) == pytest.approx((cuts[49], cuts[98]))
    assert row.requests_per_s == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize("router", ROUTERS)
def test_replicas_add_up_and_no_request_is_lost(router: str) -> None:
    # Far more requests than can be answered: all replicas are always busy.
    for replicas in (1, 2, 4):
        assert simulate(FIXED, replicas, router, 10_000).requests_per_s == pytest.approx(100 * replicas, rel=0.05)
    # Answers that are written together are bounded by how many, not by the model.
    slow = replace(FIXED, first_s=0.0, answer_s=1.0, at_once=5)
    assert simulate(slow, 2, router, 10_000).requests_per_s == pytest.approx(10, rel=0.05)


def test_documents_are_near_as_the_least_recently_used_goes() -> None:
    setting = replace(FIXED, documents=60, held=7, zipf=0.9, far_s=0.1, requests=1000)
    row = simulate(setting, 1, "nearest", 1.0)
    used: list[int] = []
    far = 0
    for number, (document,) in enumerate(draw_requests(setting, random.Random(setting.seed), 1500)):
        far += number >= 500 and document not in used[-7:]
        used = [each for each in used if each != document] + [document]
    assert row.near_share == pytest.approx(1 - far / 1000)
    assert row.far_per_s == pytest.approx(row.requests_per_s * far / 1000)
    assert simulate(replace(setting, held=0), 1, "nearest", 1.0).near_share == 0
    # Each document that is far costs what it says.
    assert simulate(replace(setting, held=0), 1, "nearest", 0.01).ttft_p50_s == pytest.approx(0.11)


def test_routing_to_the_nearest_reads_less_from_far() -> None:
    setting = ClusterSetting(
        documents=120, zipf=0.9, per_request=1, held=24, first_s=0.15, far_s=0.02, answer_s=0.1, at_once=8
    )
    near = {router: simulate(replace(setting, requests=1000), 3, router, 6.0).near_share for router in ROUTERS}
    assert near["nearest"] > near["balanced"] + 0.2
    assert near["round-robin"] == pytest.approx(near["balanced"], abs=0.03)


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    options = "--rate 5 --first-s 0.1 --far-s 0.05 --answer-s 1 --held 50 --documents 500 --replicas 1,2 --requests 200"
    shown = run(f"bench cluster {options}", "--json", out).output
    assert "nearest" in shown
    assert [(row["replicas"], row["router"]) for row in read_rows(out)] == [
        (n, each) for n in (1, 2) for each in ROUTERS
    ]


def test_what_cannot_be_is_refused() -> None:
    for wrong in ({"documents": 0}, {"held": -1}, {"zipf": float("inf")}, {"per_request": 11}, {"requests": 2}):
        with pytest.raises(ConfigError, match="request cannot name" if "per_request" in wrong else next(iter(wrong))):
            replace(FIXED, **wrong)
    for replicas, router, rate in ((0, "nearest", 1.0), (1, "farthest", 1.0), (1, "nearest", 0.0)):
        with pytest.raises(ConfigError):
            simulate(FIXED, replicas, router, rate)
