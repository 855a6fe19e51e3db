"""``cacheblend-rag bench cluster``: what a load wants of a cluster, from costs that were measured or assumed."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_lab.cli.options import parse_counts
from cacheblend_rag.cli.options import JsonOption, ModelOption, output_option
from cacheblend_rag.cli.output import console, make_quiet, parse_bytes, say_bytes, say_seconds, show_table, write_json
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from cacheblend_lab.cluster.caches import Capacities
    from cacheblend_lab.cluster.plan import PlanRow

__all__ = ["cluster_app"]

cluster_app = typer.Typer(
    help="Simulate a cluster: how many replicas, how much RAM, disk and remote bandwidth a load wants.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

CostsOption = Annotated[
    str, typer.Option("--costs", metavar="FILE", help="What `measure` or `assume` wrote, or a case: qwen2-0.5b-cpu.")
]
OutOption = Annotated[Path, output_option("--out", "Where the costs go, as JSON.")]
CorpusOption = Annotated[int, typer.Option("--corpus", min=1, help="Chunks of the corpus.")]
DocumentChunksOption = Annotated[int, typer.Option("--document-chunks", min=1, help="Chunks of a document.")]
ChunkTokensOption = Annotated[int, typer.Option("--chunk-tokens", min=1, help="Tokens of a chunk.")]
ZipfOption = Annotated[
    float, typer.Option("--zipf", min=0, max=4, help="Zipf exponent of the document requests; 0 is uniform.")
]
ChunksOption = Annotated[int, typer.Option("--chunks", min=1, help="Chunks of a prompt.")]
DocumentsOption = Annotated[int, typer.Option("--documents", min=1, help="Documents that these chunks come from.")]
QuestionOption = Annotated[int, typer.Option("--question-tokens", min=0, help="Tokens of a prompt without its chunks.")]
AnswerOption = Annotated[int, typer.Option("--answer-tokens", min=1, help="Tokens of an answer.")]
RamOption = Annotated[str, typer.Option("--ram", metavar="SIZE", help="RAM for KV per replica, for example 400GB.")]
DiskOption = Annotated[str, typer.Option("--disk", metavar="SIZE", help="Disk for KV per replica.")]
RemoteOption = Annotated[
    str | None, typer.Option("--remote", metavar="SIZE", help="Size of the remote tier; by default the whole corpus.")
]
BandwidthOption = Annotated[
    str | None,
    typer.Option(
        "--remote-bandwidth", metavar="SIZE", help="Total bytes per second of the remote tier; unlimited by default."
    ),
]
BoundOption = Annotated[
    int,
    typer.Option(
        "--queue-bound", min=0, help="How many requests longer than the shortest a queue may be for affinity."
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Random seed.")]


@cluster_app.command()
def plan(
    costs: CostsOption,
    rate: Annotated[float, typer.Option(min=0.001, help="Requests per second.")] = 1000.0,
    ttft: Annotated[
        float, typer.Option(min=0.001, help="Seconds within which 99 of 100 must have their first token.")
    ] = 2.0,
    replicas: Annotated[str, typer.Option(help="Numbers of replicas, comma-separated.")] = "1,2,5,10,20,50,100",
    most_replicas: Annotated[int, typer.Option(min=1, help="Maximum number of replicas to try for --rate.")] = 1000,
    load_share: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="Load to plan for, as a share of the maximum.")
    ] = 0.8,
    corpus: CorpusOption = 10_000_000,
    document_chunks: DocumentChunksOption = 20,
    chunk_tokens: ChunkTokensOption = 256,
    zipf: ZipfOption = 0.85,
    chunks: ChunksOption = 8,
    documents: DocumentsOption = 2,
    question_tokens: QuestionOption = 64,
    answer_tokens: AnswerOption = 128,
    ram: RamOption = "400GB",
    disk: DiskOption = "8TB",
    remote: RemoteOption = None,
    remote_bandwidth: BandwidthOption = None,
    queue_bound: BoundOption = 4,
    requests: Annotated[int, typer.Option(min=100, help="Requests per run; more give more exact results.")] = 10_000,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Show the load that clusters of several sizes sustain, with affinity and without, and the fewest replicas for a rate."""
    from cacheblend_lab.cluster.costs import costs_of
    from cacheblend_lab.cluster.plan import Goal, replicas_wanted
    from cacheblend_lab.cluster.plan import plan as plan_sizes
    from cacheblend_lab.cluster.router import ROUTERS
    from cacheblend_lab.cluster.simulation import Cluster
    from cacheblend_lab.cluster.workload import Workload

    sizes = parse_counts(replicas, "1,2,4")
    if min(sizes) < 1:
        raise ConfigError(f"{replicas} holds a number of replicas below 1")
    known = costs_of(costs)
    workload = Workload(corpus, document_chunks, chunk_tokens, zipf, chunks, documents, question_tokens, answer_tokens)
    room = _room(ram, disk, remote)
    bandwidth = None if remote_bandwidth is None else float(parse_bytes(remote_bandwidth))
    goal = Goal(rate, ttft, load_share)
    wanted = {}
    with console(stderr=True).status("simulating") as status:
        base = Cluster(known, 1, room, queue_bound=queue_bound, remote_bytes_per_s=bandwidth)
        rows = plan_sizes(base, workload, sizes, load_share, requests, seed, status.update)
        for router in ROUTERS:
            sized = Cluster(known, 1, room, router, queue_bound, bandwidth)
            wanted[router] = replicas_wanted(sized, workload, goal, most_replicas, requests, seed, status.update)
    # Every chunk has two KVs.
    corpus_bytes = 2 * corpus * chunk_tokens * known.stored_bytes_per_token
    title = (
        f"{known.name}: {corpus:,} chunks of {chunk_tokens} tokens, {say_bytes(corpus_bytes)}; prompts of {chunks} chunks from "
        f"{documents} documents, Zipf {zipf:g}; a replica has {ram} of RAM and {disk} of disk"
    )
    columns = (
        "router",
        "replicas",
        "most a second",
        f"at {load_share:.0%} of it: near",
        "in RAM",
        "at home",
        "computed",
    )
    show_table(title, (*columns, "remote", "TTFT p50", "p99"), [_cells(row) for row in rows])
    typer.echo(f"costs: {known.source}")
    asked = f"{rate:g} requests a second with a first token in {ttft:g} s"
    for router, found in wanted.items():
        if found is None:
            typer.echo(f"{router}: {asked} want more than {most_replicas} replicas")
        else:
            outcome = found.outcome
            typer.echo(
                f"{router}: {asked} want {found.replicas} replicas; {outcome.near_share:.0%} near, "
                f"{say_bytes(outcome.remote_bytes_per_s)}/s from the remote tier, TTFT p99 {say_seconds(outcome.ttft_p99_s)}"
            )
    write_json(
        json_file,
        "bench cluster plan",
        costs=known.to_dict(),
        workload=asdict(workload),
        capacities=asdict(room),
        goal=asdict(goal),
        rows=[asdict(row) for row in rows],
        wanted={router: None if found is None else asdict(found) for router, found in wanted.items()},
    )


@cluster_app.command()
def near(
    costs: CostsOption,
    rate: Annotated[float, typer.Option(min=0.001, help="Requests per second.")] = 1000.0,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas.")] = 80,
    disks: Annotated[
        str, typer.Option(help="Disk for KV of a replica, comma-separated sizes.")
    ] = "0,1TB,2TB,4TB,8TB,16TB",
    corpus: CorpusOption = 10_000_000,
    document_chunks: DocumentChunksOption = 20,
    chunk_tokens: ChunkTokensOption = 256,
    zipf: ZipfOption = 0.85,
    chunks: ChunksOption = 8,
    documents: DocumentsOption = 2,
    ram: RamOption = "400GB",
    remote: RemoteOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Show how much KV is near, by disk per replica, and the load on the remote tier; queues are left out."""
    from cacheblend_lab.cluster.costs import costs_of
    from cacheblend_lab.cluster.router import ROUTERS
    from cacheblend_lab.cluster.simulation import Cluster, nearness
    from cacheblend_lab.cluster.workload import Workload

    known = costs_of(costs)
    workload = Workload(corpus, document_chunks, chunk_tokens, zipf, chunks, documents)
    request_bytes = chunks * chunk_tokens * known.stored_bytes_per_token
    rows: list[dict[str, Any]] = []
    for size in disks.split(","):
        for router in ROUTERS if replicas > 1 else ROUTERS[:1]:
            found = nearness(Cluster(known, replicas, _room(ram, size, remote), router), workload, seed)
            far_bytes = request_bytes * (1 - found.near_share - found.missing_share)
            rows.append(
                {
                    "disk_bytes": parse_bytes(size),
                    "router": router,
                    "near_share": found.near_share,
                    "ram_share": found.ram_share,
                    "missing_share": found.missing_share,
                    "remote_bytes_per_s": far_bytes * rate,
                }
            )
    show_table(
        f"{known.name}: {corpus:,} chunks of {chunk_tokens} tokens, prompts of {chunks} chunks from {documents} documents, Zipf "
        f"{zipf:g}; {replicas} replicas with {ram} of RAM",
        ("router", "disk each", "near", "in RAM", "computed", f"remote at {rate:g}/s"),
        [
            (
                row["router"],
                say_bytes(row["disk_bytes"]),
                f"{row['near_share']:.1%}",
                f"{row['ram_share']:.1%}",
                f"{row['missing_share']:.1%}",
                f"{say_bytes(row['remote_bytes_per_s'])}/s",
            )
            for row in rows
        ],
    )
    write_json(
        json_file, "bench cluster near", costs=known.to_dict(), workload=asdict(workload), replicas=replicas, rows=rows
    )


@cluster_app.command()
def zipf(
    log: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", exists=True, dir_okay=False, help="A log with one line per retrieved document: its name."
        ),
    ],
    documents: Annotated[int, typer.Option(min=2, help="Documents of the corpus, including those never retrieved.")],
) -> None:
    """Fit the exponent for --zipf, how unequally documents are requested, to a log of retrieved documents."""
    from cacheblend_lab.cluster.popularity import Popularity, fit_zipf

    counts = Counter(line.strip() for line in log.read_text(encoding="utf-8").splitlines() if line.strip())
    if len(counts) > documents:
        raise ConfigError(f"{log} names {len(counts)} documents, more than the {documents} of the corpus")
    ordered = sorted(counts.values(), reverse=True)
    exponent = fit_zipf(ordered + [0] * (documents - len(ordered)))
    most = max(round(0.01 * documents), 1)
    typer.echo(
        f"--zipf {exponent:.2f}; the first {most} documents got {sum(ordered[:most]) / sum(ordered):.0%} of {sum(ordered)} "
        f"retrievals, and get {Popularity(documents, exponent).share_of_first(most / documents):.0%} by that law"
    )


@cluster_app.command()
def assume(
    out: OutOption,
    name: Annotated[str, typer.Option(help="Its name in tables.")],
    parameters: Annotated[float, typer.Option(min=1, help="Number of active weights per token.")],
    kv_bytes: Annotated[float, typer.Option("--kv-bytes-per-token", min=1, help="KV bytes per token on the device.")],
    flops: Annotated[
        float, typer.Option("--flops-per-s", min=1, help="Dense FLOP/s of the device, in the dtype of the weights.")
    ],
    memory: Annotated[float, typer.Option("--memory-bytes-per-s", min=1, help="Bandwidth of the device's memory.")],
    ram_rate: Annotated[float, typer.Option("--ram-bytes-per-s", min=1, help="From host memory to the device.")],
    disk_rate: Annotated[float, typer.Option("--disk-bytes-per-s", min=1, help="From a replica's disks.")],
    remote_rate: Annotated[float, typer.Option("--remote-bytes-per-s", min=1, help="From the network to a replica.")],
    remote_read: Annotated[float, typer.Option("--remote-read-s", min=1e-9, help="Until a chunk's first remote byte.")],
    compute_share: Annotated[float, typer.Option(min=0.01, max=1, help="Achieved share of --flops-per-s.")],
    memory_share: Annotated[float, typer.Option(min=0.01, max=1, help="Achieved share of --memory-bytes-per-s.")],
    stored_share: Annotated[float, typer.Option(min=0.01, max=2, help="Stored bytes over bytes on the device.")] = 1.0,
    weight_bytes: Annotated[float, typer.Option(min=0.1, help="Bytes of a weight.")] = 2.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 2112,
    answers: Annotated[int, typer.Option("--answers-at-once", min=1, help="Maximum answers decoded together.")] = 64,
) -> None:
    """Write costs by formula, from data sheets, for devices that were not measured; they are marked as assumed."""
    from cacheblend_lab.cluster.hardware import Hardware, assume_costs

    hardware = Hardware(
        name,
        parameters,
        kv_bytes,
        flops,
        memory,
        ram_rate,
        disk_rate,
        remote_rate,
        remote_read,
        compute_share,
        memory_share,
        stored_share,
        weight_bytes,
        answers_at_once=answers,
    )
    out.write_text(json.dumps(assume_costs(hardware, prompt_tokens).to_dict(), indent=2) + "\n", encoding="utf-8")
    typer.echo(f"written: {out}")


@cluster_app.command()
def measure(
    out: OutOption,
    remote: Annotated[str, typer.Option("--remote-url", metavar="URL", help="A remote tier that nothing else uses.")],
    model: ModelOption = "reference",
    corpus: CorpusOption = 480,
    document_chunks: DocumentChunksOption = 4,
    words: Annotated[int, typer.Option(min=4, help="Words of a chunk.")] = 48,
    chunks: ChunksOption = 8,
    documents: DocumentsOption = 4,
    in_ram: Annotated[int, typer.Option(min=2, help="KVs of chunks that RAM holds.")] = 24,
    on_disk: Annotated[int, typer.Option(min=4, help="KVs of chunks that the disk holds.")] = 72,
    requests: Annotated[int, typer.Option(min=16, help="Requests of each scan.")] = 64,
) -> None:
    """Measure a replica's costs on this machine: start a server, and request chunks in RAM, on disk and in the remote tier."""
    from cacheblend_lab.cluster.measure import measure_costs
    from cacheblend_lab.cluster.workload import Workload

    make_quiet()
    workload = Workload(corpus, document_chunks, chunks=chunks, documents=documents)
    with console(stderr=True).status("starting a server") as status, tempfile.TemporaryDirectory() as folder:
        found, _ = measure_costs(
            Path(folder), model, remote, workload, words, in_ram, on_disk, requests, say=status.update
        )
    out.write_text(json.dumps(found.to_dict(), indent=2) + "\n", encoding="utf-8")
    typer.echo(f"{found.source}; written: {out}")


@cluster_app.command()
def compare(
    costs: CostsOption,
    urls: Annotated[str, typer.Option(help="Addresses of servers on this machine without /v1, comma-separated.")],
    in_ram: Annotated[int, typer.Option(min=2, help="KVs of chunks that the RAM of each holds.")],
    on_disk: Annotated[int, typer.Option(min=0, help="KVs of chunks that the disk of each holds.")],
    corpus: CorpusOption = 480,
    document_chunks: DocumentChunksOption = 4,
    words: Annotated[int, typer.Option(min=4, help="Words of a chunk.")] = 48,
    zipf: ZipfOption = 0.8,
    chunks: ChunksOption = 8,
    documents: DocumentsOption = 4,
    answer_tokens: AnswerOption = 8,
    clients: Annotated[int, typer.Option(min=1, help="Clients per server, one request each at a time.")] = 6,
    requests: Annotated[int, typer.Option(min=50, help="Requests in all.")] = 300,
    router: Annotated[str, typer.Option(help="affinity or random.")] = "affinity",
    queue_bound: BoundOption = 4,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Send requests to real servers as fast as they answer, and compare with the simulator on the same requests."""
    from cacheblend_lab.cluster.asking import store_corpus
    from cacheblend_lab.cluster.comparison import Trial, compare_servers
    from cacheblend_lab.cluster.costs import costs_of
    from cacheblend_lab.cluster.measure import measure_cores
    from cacheblend_lab.cluster.workload import Workload

    make_quiet()
    addresses = [url.strip() for url in urls.split(",")]
    workload = Workload(corpus, document_chunks, 1, zipf, chunks, documents, output_tokens=answer_tokens)
    trial = Trial(workload, in_ram, on_disk, clients, requests, router, queue_bound, seed)
    with console(stderr=True).status("handing the corpus over") as status:
        store_corpus(addresses, workload, words)
        status.update("measuring how the servers share cores")
        cores = measure_cores(addresses, workload, in_ram, clients, max(requests // len(addresses), 4 * clients))
        status.update("asking")
        found = compare_servers(addresses, trial, costs_of(costs), cores)
    show_table(
        f"{len(addresses)} replicas, {router}, together {cores.powers[len(addresses) - 1]:.2f} times as fast as one",
        ("", "measured", "simulated", "simulated / measured"),
        [
            (
                "requests a second",
                f"{found.measured.requests_per_s:.2f}",
                f"{found.simulated.requests_per_s:.2f}",
                f"{found.rate_ratio:.2f}",
            ),
            (
                "near",
                f"{found.measured.near_share:.1%}",
                f"{found.simulated.near_share:.1%}",
                f"{found.near_ratio:.2f}",
            ),
        ],
    )
    write_json(json_file, "bench cluster compare", cores=asdict(cores), trial=asdict(trial), **found.to_dict())


def _room(ram: str, disk: str, remote: str | None) -> Capacities:
    from cacheblend_lab.cluster.caches import Capacities

    return Capacities(parse_bytes(ram), parse_bytes(disk), None if remote is None else parse_bytes(remote))


def _cells(row: PlanRow) -> tuple[str, ...]:
    outcome = row.outcome
    return (
        row.router if row.replicas > 1 else "any",
        str(row.replicas),
        f"{row.most_per_s:.4g}",
        f"{outcome.near_share:.1%}",
        f"{outcome.ram_share:.1%}",
        f"{outcome.home_share:.0%}",
        f"{outcome.missing_share:.1%}",
        f"{say_bytes(outcome.remote_bytes_per_s)}/s",
        say_seconds(outcome.ttft_p50_s),
        say_seconds(outcome.ttft_p99_s),
    )
