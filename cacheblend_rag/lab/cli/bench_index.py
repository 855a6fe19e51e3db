"""``cacheblend-rag bench index``: the store's index by its number of entries."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import say_bytes, say_seconds, show_table, write_json
from cacheblend_rag.lab.cli.bench_output import measuring
from cacheblend_rag.lab.cli.options import parse_counts

__all__ = ["index"]


def index(
    entries: Annotated[str, typer.Option(help="Entries of each store, comma-separated.")] = "10000,100000,1000000",
    lookups: Annotated[int, typer.Option(min=100, help="Lookups of 8 random ids that are timed.")] = 10_000,
    folder: Annotated[
        Path | None, typer.Option(file_okay=False, help="Make the stores in this empty folder, and leave them there.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure the store's index by its number of entries: opening, looking up the chunks of a prompt, memory.

    Each store is measured in a process of its own, with its index in the page cache. Its chunk files are not written.
    """
    from cacheblend_rag.lab.bench.index import IndexBench

    bench = IndexBench(parse_counts(entries), folder, lookups)
    with measuring("making the stores") as progress:
        rows = bench.measure(progress)
    lines = [
        (
            f"{row.entries:,}",
            say_bytes(row.file_bytes),
            say_seconds(row.open_s),
            say_seconds(row.lookup_p50_s),
            say_seconds(row.lookup_p99_s),
            say_bytes(row.rss_bytes),
        )
        for row in rows
    ]
    columns = ("entries", "index", "opening", "8 ids, median", "8 ids, 99 %", "memory")
    show_table(f"the store's index, {lookups} lookups of 8 ids", columns, lines, text_columns=0)
    write_json(json_file, "bench index", [asdict(row) for row in rows])
