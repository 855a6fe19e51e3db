"""Real servers, asked as the simulator's are: where their chunks are is what the simulator says."""

from pathlib import Path

import pytest

from cacheblend_lab.cluster.asking import store_corpus
from cacheblend_lab.cluster.caches import Capacities
from cacheblend_lab.cluster.cases import CASES
from cacheblend_lab.cluster.comparison import Trial, compare_servers
from cacheblend_lab.cluster.measure import measure_cores, stored_chunk_bytes
from cacheblend_lab.cluster.servers import Servers, cpu_s
from cacheblend_lab.cluster.workload import Workload
from tests.store.remote.conftest import RedisServer, needs_redis

WORKLOAD = Workload(
    corpus_chunks=80, chunks_per_document=4, chunk_tokens=64, zipf=0.8, chunks=4, documents=2, output_tokens=2
)
IN_RAM, ON_DISK, WORDS = 10, 25, 20


@pytest.mark.full
def test_what_is_near_at_real_servers_is_what_the_simulator_says(tmp_path: Path) -> None:
    needs_redis()
    redis = RedisServer(tmp_path)
    redis.start()
    try:
        chunk_bytes = stored_chunk_bytes(tmp_path / "size", "reference", redis.url(), WORKLOAD, WORDS)
        (tmp_path / "servers").mkdir()
        room = Capacities((IN_RAM + 0.5) * chunk_bytes, (ON_DISK + 0.5) * chunk_bytes)
        with Servers(tmp_path / "servers", "reference", 2, room, redis.url()) as servers:
            assert cpu_s(servers.process_ids) > cpu_s([])
            store_corpus(servers.urls, WORKLOAD, WORDS)
            trial = Trial(WORKLOAD, IN_RAM, ON_DISK, 2, 200, "affinity")
            cores = measure_cores(servers.urls, WORKLOAD, IN_RAM, 2, 20)
            found = compare_servers(servers.urls, trial, CASES["qwen2-0.5b-cpu"], cores)
    finally:
        redis.kill()
    # Whole ones and caches of their own, or half of one.
    assert cores.powers[0] == 1 and 0.5 < cores.powers[1] <= 2
    assert found.measured.missing_share == 0
    assert 0.2 < found.measured.near_share < 0.9
    assert found.near_ratio == pytest.approx(1, abs=0.15)
