"""``cacheblend-rag bench load``: how fast stored KV is loaded."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import make_quiet, say_bytes, say_seconds, show_table, write_json
from cacheblend_rag.lab.cli.bench_output import measuring, say_cached, say_range
from cacheblend_rag.lab.cli.options import (
    ChunkTokensOption,
    FolderOption,
    RepeatsOption,
    ShapeOption,
    parse_counts,
    plain_values,
)

__all__ = ["load"]


def load(
    shape: ShapeOption = "qwen2-0.5b",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks.")] = 6,
    chunk_tokens: ChunkTokensOption = 512,
    threads: Annotated[
        str, typer.Option(help="Numbers of loader threads, comma-separated; 0 is the pipeline switched off.")
    ] = "0,1,2,4",
    repeats: RepeatsOption = 5,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    folder: FolderOption = None,
    json_file: JsonOption = None,
) -> None:
    """Measure how fast the loader reads, checks and assembles stored KV, beside plain reads of the same files, in alternation.

    The page cache is emptied of the files before each run.
    """
    from cacheblend_rag.lab.bench import LoadBench, LoadSetting

    make_quiet()
    setting = LoadSetting(
        shape=shape,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        threads=parse_counts(threads, "0,1,2,4"),
        repeats=repeats,
        dtype=dtype,
        folder=folder,
    )
    with measuring("making the files") as progress, LoadBench(setting) as bench:
        rows = bench.measure(progress)
        cached = bench.cached_share_after_drop()
    lines = [
        (
            row.method,
            row.threads,
            say_seconds(row.seconds),
            say_range(row.seconds_min, row.seconds_max),
            f"{say_bytes(row.bytes_per_s)}/s",
            f"{row.of_plain_reads:.2f}x",
        )
        for row in rows
    ]
    title = (
        f"{shape}, {dtype}: {chunks} files of {chunk_tokens} tokens, {say_bytes(bench.file_bytes)} in all, "
        f"median of {repeats}"
    )
    show_table(title, ("method", "threads", "time", "range", "throughput", "of plain reads"), lines)
    say_cached(cached)
    facts = plain_values(asdict(setting)) | {
        "file_bytes": bench.file_bytes,
        "cached_share_after_drop": cached,
    }
    shared = {"shape": shape, "dtype": dtype, "file_bytes": bench.file_bytes}
    write_json(
        json_file, "bench load", [asdict(row) | shared for row in rows], model=f"random weights, {shape}", setting=facts
    )
