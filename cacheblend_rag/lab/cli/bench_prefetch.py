"""``cacheblend-rag bench prefetch``: reading stored KV while a reranker works."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import make_quiet, say_bytes, say_seconds, show_table
from cacheblend_rag.lab.cli.bench_output import measuring, say_cached, say_range, write_bench
from cacheblend_rag.lab.cli.options import (
    ChunkTokensOption,
    DeviceOption,
    FolderOption,
    QuestionTokensOption,
    RepeatsOption,
    ShapeOption,
    WeightsOption,
    weights_dtype,
)

__all__ = ["prefetch"]


def prefetch(
    shape: ShapeOption = "qwen2-0.5b",
    candidates: Annotated[int, typer.Option(min=1, help="Chunks that are retrieved.")] = 12,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of them that the reranker chooses.")] = 6,
    chunk_tokens: ChunkTokensOption = 512,
    question_tokens: QuestionTokensOption = 32,
    reranker_ms: Annotated[float, typer.Option(min=0, help="Milliseconds that the reranker takes.")] = 200,
    ratio: Annotated[float, typer.Option(min=0, max=1, help="The recompute ratio.")] = 0.15,
    selector: Annotated[str, typer.Option(help="Who chooses what is recomputed.")] = "hkvd",
    folder: FolderOption = None,
    repeats: RepeatsOption = 5,
    device: DeviceOption = "cpu",
    dtype: WeightsOption = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, tokens and the reranker's choice.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure the time to the first token behind a reranker, when the candidates' KV is on disk: read when the prompt comes,
    prefetched while the reranker works, or in RAM before.

    The reranker waits, and computes nothing. The page cache is emptied of the files before each run.
    """
    from cacheblend_rag.lab.bench import PrefetchBench, PrefetchSetting

    make_quiet()
    setting = PrefetchSetting(
        shape=shape,
        candidates=candidates,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        reranker_s=reranker_ms / 1000,
        ratio=ratio,
        selector=selector,
        repeats=repeats,
        device=device,
        dtype=weights_dtype(dtype, device),
        folder=folder,
        seed=seed,
    )
    with measuring("making the model and its chunks") as progress, PrefetchBench(setting) as bench:
        rows = bench.measure(progress)
        cached = bench.cached_share_after_drop()
    lines = [
        (
            row.method,
            say_seconds(row.ttft_s),
            say_range(row.ttft_min_s, row.ttft_max_s),
            f"{row.of_disk:.2f}x",
            say_seconds(row.load_s),
            say_seconds(row.total_s),
            ", ".join(f"{count} {tier}" for tier, count in sorted(row.tiers.items())),
        )
        for row in rows
    ]
    title = (
        f"{shape}, {setting.dtype} on {device}: {chunks} of {candidates} chunks of {chunk_tokens} tokens "
        f"({say_bytes(bench.file_bytes)} in all), a reranker of {say_seconds(setting.reranker_s)}, median of {repeats}"
    )
    columns = ("method", "first token", "range", "of disk", "waited", "with reranker", "read from")
    show_table(title, columns, lines)
    say_cached(cached)
    write_bench(
        json_file,
        "bench prefetch",
        setting,
        rows,
        file_bytes=bench.file_bytes,
        cached_share_after_drop=cached,
    )
