"""The simulator against real replicas on this machine: ``python -m lab.tests.cluster.check_real``.

It starts a redis-server and one server over it, measures a replica's costs, then starts one, two and four servers, asks each set
as fast as it answers, and prints what was measured, what the simulator says, and their ratio. Nothing else should run meanwhile.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from cacheblend_lab.cluster.asking import store_corpus
from cacheblend_lab.cluster.caches import Capacities
from cacheblend_lab.cluster.comparison import Comparison, Trial, compare_servers
from cacheblend_lab.cluster.measure import measure_cores, measure_costs
from cacheblend_lab.cluster.servers import Servers
from cacheblend_lab.cluster.workload import Workload
from cacheblend_rag.cli.output import make_quiet, write_json
from tests.store.remote.conftest import RedisServer

MODEL = "reference"
WORKLOAD = Workload(
    corpus_chunks=480, chunks_per_document=4, chunk_tokens=64, zipf=0.8, chunks=8, documents=4, output_tokens=8
)
WORDS = 48
# Chunks that fit into the RAM and on the disk of a replica, so that not all is near.
IN_RAM, ON_DISK = 24, 72
CLIENTS_PER_REPLICA = 6
SCAN_REQUESTS, CORES_REQUESTS = 64, 150


@contextmanager
def redis(folder: Path) -> Iterator[tuple[str, int]]:
    folder.mkdir(parents=True)
    server = RedisServer(folder)
    server.start()
    assert server._process
    try:
        yield server.url(), server._process.pid
    finally:
        server.kill()


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--requests", type=int, default=400)
    reader.add_argument("--sizes", default="1,2,4")
    reader.add_argument("--folder", type=Path, help="where stores are made; on a RAM disk, cores alone are shared")
    reader.add_argument("--json", type=Path)
    asked = reader.parse_args()
    make_quiet()
    rows: list[Comparison] = []
    sizes = [int(size) for size in asked.sizes.split(",")]
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        with redis(folder / "redis") as (url, process):
            costs, scans = measure_costs(
                folder / "costs", MODEL, url, WORKLOAD, WORDS, IN_RAM, ON_DISK, SCAN_REQUESTS, [process]
            )
        print(json.dumps(costs.to_dict(), indent=1), flush=True)
        chunk_bytes = costs.stored_bytes_per_token * sum(each.reused_tokens for each in scans)
        chunk_bytes /= sum(each.ram + each.disk + each.remote for each in scans)
        room = Capacities((IN_RAM + 0.5) * chunk_bytes, (ON_DISK + 0.5) * chunk_bytes)
        with redis(folder / "cores") as (url, _), Servers(folder / "cores", MODEL, max(sizes), room, url) as servers:
            store_corpus(servers.urls, WORKLOAD, WORDS)
            cores = measure_cores(servers.urls, WORKLOAD, IN_RAM, CLIENTS_PER_REPLICA, CORES_REQUESTS)
        print(f"what replicas do together: {', '.join(f'{power:.2f}' for power in cores.powers)}", flush=True)
        for replicas in sizes:
            for router in ("affinity", "random") if replicas > 1 else ("affinity",):
                place = folder / f"{replicas}-{router}"
                trial = Trial(WORKLOAD, IN_RAM, ON_DISK, CLIENTS_PER_REPLICA, asked.requests, router)
                with redis(place) as (url, process), Servers(place, MODEL, replicas, room, url) as servers:
                    store_corpus(servers.urls, WORKLOAD, WORDS)
                    processes = [*servers.process_ids, process]
                    rows.append(compare_servers(servers.urls, trial, costs, cores, processes))
                print_row(rows[-1])
    write_json(
        asked.json,
        "lab.tests.cluster.check_real",
        cores=asdict(cores),
        costs=costs.to_dict(),
        scans=[asdict(each) for each in scans],
        workload=asdict(WORKLOAD),
        in_ram=IN_RAM,
        on_disk=ON_DISK,
        clients_per_replica=CLIENTS_PER_REPLICA,
        requests=asked.requests,
        folder=None if asked.folder is None else str(asked.folder),
        rows=[each.to_dict() for each in rows],
    )


def print_row(row: Comparison) -> None:
    real, said = row.measured, row.simulated
    print(
        f"{row.replicas} replicas, {row.router}: {real.requests_per_s:.2f} requests/s measured, {said.requests_per_s:.2f} "
        f"simulated ({row.rate_ratio:.2f}); near {real.near_share:.3f} measured, {said.near_share:.3f} simulated "
        f"({row.near_ratio:.2f}); batches of {real.batch_size:.1f}; others took {row.others_share:.0%} of the cores",
        flush=True,
    )


if __name__ == "__main__":
    main()
