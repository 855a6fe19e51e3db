"""``cacheblend-rag bench ttft``: the time to the first token."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import make_quiet, parse_names, parse_ratios, say_seconds, show_table
from cacheblend_rag.lab.cli.bench_output import measuring, say_cached, say_range, write_bench
from cacheblend_rag.lab.cli.options import (
    ChunksOption,
    ChunkTokensOption,
    DeviceOption,
    FolderOption,
    QuestionTokensOption,
    RepeatsOption,
    SeedOption,
    ShapeOption,
    WeightsOption,
    weights_dtype,
)

__all__ = ["ttft"]


def ttft(
    shape: ShapeOption = "qwen2-0.5b",
    chunks: ChunksOption = 6,
    chunk_tokens: ChunkTokensOption = 512,
    question_tokens: QuestionTokensOption = 32,
    ratios: Annotated[
        str, typer.Option(help="Recompute ratios, comma-separated; 0 is plain reuse.")
    ] = "0,0.05,0.15,0.3",
    selectors: Annotated[str, typer.Option(help="Selectors to measure at each ratio, comma-separated.")] = "hkvd",
    tiers: Annotated[
        str,
        typer.Option(
            "--tiers",
            "--tier",
            help="Where stored KV is read from, comma-separated: ram, disk (the page cache is emptied of it before each run), or "
            "a rate such as 100MB/s for an emulated device; with -no-pipeline behind it, loaded without the pipeline.",
        ),
    ] = "ram",
    head_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of fixed text before the chunks, for a row of prompts without gaps.")
    ] = 0,
    separator_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of the engine's separator between the chunks, for that row.")
    ] = 0,
    folder: FolderOption = None,
    repeats: RepeatsOption = 5,
    device: DeviceOption = "cpu",
    dtype: WeightsOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure the time to the first token: full prefill, the model's own prefix cache, plain reuse and blend, in alternation.

    Full prefill is the model's own forward pass over the whole prompt; "prefix_cache" is its own cache of the first chunk.
    "reuse" and "blend" are of chunks that were encoded alone, "in_document" is plain reuse of the same chunks as pieces of one
    document, and "gapless" that behind a fixed head and with separators, whose KV is stored too; "of reuse" is how much of plain
    reuse's speed is left. "limit" is the speedup if computing rows were all that took time, "of limit" how much of it is there.
    """
    from cacheblend_rag.lab.bench import TTFTBench, TTFTSetting

    make_quiet()
    setting = TTFTSetting(
        shape=shape,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        ratios=parse_ratios(ratios),
        selectors=parse_names(selectors),
        tiers=parse_names(tiers),
        folder=folder,
        head_tokens=head_tokens,
        separator_tokens=separator_tokens,
        repeats=repeats,
        device=device,
        dtype=weights_dtype(dtype, device),
        seed=seed,
    )
    with measuring("making the model and its chunks") as progress, TTFTBench(setting) as bench:
        rows = bench.measure(progress)
        cached = bench.cached_share_after_drop()
    lines = [
        (
            row.method,
            row.selector,
            row.recompute_ratio,
            row.tier if row.pipeline in (None, True) else f"{row.tier}, no pipeline",
            f"{row.charged_ratio:.3f}",
            say_seconds(row.ttft_s),
            say_range(row.ttft_min_s, row.ttft_max_s),
            f"{row.speedup:.2f}x",
            f"{row.limit:.1f}x",
            f"{row.speedup / row.limit:.2f}",
            None if row.over_ram is None else f"{row.over_ram:.2f}x",
            None if row.of_reuse is None else f"{row.of_reuse:.2f}",
            None if row.load_s is None else say_seconds(row.load_s),
        )
        for row in rows
    ]
    title = (
        f"{shape}, {setting.dtype} on {device}: {chunks} chunks of {chunk_tokens} tokens and a question of {question_tokens}, "
        f"median of {repeats}"
    )
    columns = (
        "method",
        "selector",
        "ratio",
        "tier",
        "charged",
        "first token",
        "range",
        "speedup",
        "limit",
        "of limit",
        "of ram",
        "of reuse",
        "waited",
    )
    show_table(title, columns, lines, text_columns=2)
    say_cached(cached)
    tokens = len(bench.token_ids)
    write_bench(
        json_file,
        "bench ttft",
        setting,
        rows,
        {"prompt_tokens": tokens},
        prompt_tokens=tokens,
        context_tokens=bench.context_tokens,
        cached_share_after_drop=cached,
    )
