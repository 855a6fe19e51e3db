"""``cacheblend-rag bench tpot``: the time per output token and the KV held, with and without eviction."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import make_quiet, parse_names, say_bytes, say_seconds, show_table
from cacheblend_rag.lab.cli.bench_output import measuring, say_range, write_bench
from cacheblend_rag.lab.cli.options import (
    ChunksOption,
    ChunkTokensOption,
    DeviceOption,
    QuestionTokensOption,
    RepeatsOption,
    SeedOption,
    ShapeOption,
    WeightsOption,
    parse_capacities,
    weights_dtype,
)

__all__ = ["tpot"]


def tpot(
    shape: ShapeOption = "qwen2-0.5b",
    chunks: ChunksOption = 6,
    chunk_tokens: ChunkTokensOption = 512,
    question_tokens: QuestionTokensOption = 32,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated.")] = 32,
    capacities: Annotated[
        str,
        typer.Option(help="Context KV that is kept, comma-separated: a share (0.25) or a number of tokens (512)."),
    ] = "0.25",
    methods: Annotated[
        str, typer.Option(help="How the prompt is prefilled, comma-separated: full, blend.")
    ] = "full,blend",
    ratio: Annotated[float, typer.Option(help="Recompute ratio of the blend.")] = 0.15,
    selector: Annotated[str, typer.Option(help="Selector of the blend.")] = "hkvd",
    repeats: RepeatsOption = 5,
    device: DeviceOption = "cpu",
    dtype: WeightsOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure the time per output token and the KV held, by full prefill and blend, with all KV and with evicted KV (SnapKV).

    "faster" and "added" compare with the same method without eviction, round by round.
    """
    from cacheblend_rag.lab.bench import TPOTBench, TPOTSetting

    make_quiet()
    setting = TPOTSetting(
        shape=shape,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        output_tokens=output_tokens,
        capacities=parse_capacities(capacities),
        methods=parse_names(methods),
        ratio=ratio,
        selector=selector,
        repeats=repeats,
        device=device,
        dtype=weights_dtype(dtype, device),
        seed=seed,
    )
    with measuring("making the model and its chunks") as progress, TPOTBench(setting) as bench:
        rows = bench.measure(progress)
    lines = [
        (
            row.method,
            "all" if row.kv_capacity is None else row.kv_capacity,
            row.evicted_tokens,
            say_bytes(row.kv_bytes),
            say_seconds(row.tpot_s),
            say_range(row.tpot_min_s, row.tpot_max_s),
            f"{row.tpot_speedup:.2f}x",
            say_seconds(row.ttft_s),
            f"{row.ttft_added:+.1%}",
        )
        for row in rows
    ]
    title = (
        f"{shape}, {setting.dtype} on {device}: {chunks} chunks of {chunk_tokens} tokens, a question of {question_tokens}, "
        f"{output_tokens} output tokens, median of {repeats}"
    )
    columns = ("method", "kept", "evicted", "KV", "per token", "range", "faster", "first token", "added")
    show_table(title, columns, lines, text_columns=2)
    tokens = len(bench.token_ids)
    write_bench(json_file, "bench tpot", setting, rows, {"prompt_tokens": tokens}, prompt_tokens=tokens)
