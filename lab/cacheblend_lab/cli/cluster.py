"""``cacheblend-rag bench cluster``: how many replicas a load needs, and what routing by nearness saves."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cacheblend_lab.cli.options import parse_counts
from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import console, say_seconds, show_table, write_json

__all__ = ["cluster"]


def cluster(
    rate: Annotated[float, typer.Option(help="Requests per second, of the whole cluster.")],
    first_s: Annotated[float, typer.Option("--first-s", help="Seconds to the first token with all documents near.")],
    far_s: Annotated[float, typer.Option("--far-s", help="Seconds that a document from the remote tier adds.")],
    answer_s: Annotated[float, typer.Option("--answer-s", help="Seconds from the first token to the last.")],
    held: Annotated[int, typer.Option(help="Documents for which a replica has room, in RAM or on its disk.")],
    documents: Annotated[int, typer.Option(help="Documents of the corpus.")],
    replicas: Annotated[str, typer.Option(help="Numbers of replicas, comma-separated.")] = "1,2,4,8",
    per_request: Annotated[int, typer.Option(help="Documents that a request names.")] = 2,
    zipf: Annotated[float, typer.Option(help="Zipf exponent of the documents asked for; 0 is uniform.")] = 0.85,
    at_once: Annotated[int, typer.Option(help="Answers that a replica writes at a time.")] = 16,
    queue_bound: Annotated[int, typer.Option(help="Requests by which the nearest replica's queue may be longer.")] = 4,
    requests: Annotated[int, typer.Option(help="Requests counted, after half as many that fill the replicas.")] = 4000,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Simulate clusters of several sizes: near documents and time to first token, by router."""
    from cacheblend_lab.cluster import ROUTERS, ClusterSetting, simulate

    setting = ClusterSetting(
        documents=documents,
        zipf=zipf,
        per_request=per_request,
        held=held,
        first_s=first_s,
        far_s=far_s,
        answer_s=answer_s,
        at_once=at_once,
        queue_bound=queue_bound,
        requests=requests,
        seed=seed,
    )
    with console(stderr=True).status("simulating"):
        rows = [
            simulate(setting, count, router, rate) for count in parse_counts(replicas, "1,2,4") for router in ROUTERS
        ]
    show_table(
        f"{rate:g} requests a second, each of {per_request} of {documents:,} documents; {held:,} near each replica",
        ("router", "replicas", "answers a second", "near", "far a second", "TTFT p50", "p99"),
        [
            (
                row.router,
                str(row.replicas),
                f"{row.requests_per_s:.3g}",
                f"{row.near_share:.0%}",
                f"{row.far_per_s:.3g}",
                say_seconds(row.ttft_p50_s),
                say_seconds(row.ttft_p99_s),
            )
            for row in rows
        ],
    )
    write_json(json_file, "bench cluster", [asdict(row) for row in rows], setting=asdict(setting))
