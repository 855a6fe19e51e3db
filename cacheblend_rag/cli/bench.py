"""``cacheblend-rag bench``: speed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import (
    console,
    make_quiet,
    parse_counts,
    parse_ratios,
    say_bytes,
    say_seconds,
    show_table,
    write_json,
)

__all__ = ["bench_app"]

bench_app = typer.Typer(
    help="Measure speed: on random weights at the shapes of real models, and of the store's index.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench_app.command()
def ttft(
    shape: Annotated[
        str, typer.Option(help="tiny, smollm2-360m, qwen2-0.5b, llama-3.2-1b, qwen2.5-7b or llama-3.1-8b.")
    ] = "qwen2-0.5b",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in the prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each chunk.")] = 512,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the question.")] = 32,
    ratios: Annotated[
        str, typer.Option(help="Recompute ratios, comma-separated; 0 is plain reuse.")
    ] = "0,0.05,0.15,0.3",
    selectors: Annotated[str, typer.Option(help="Selectors to measure at each ratio, comma-separated.")] = "hkvd",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each runs every method once. The median counts.")] = 5,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; by default float32 on the CPU, else bfloat16.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure the time to the first token: full prefill, the model's own prefix cache, plain reuse and blend, in alternation.

    Full prefill is the model's own forward pass over the whole prompt; "prefix_cache" is its own cache of the first chunk.
    "limit" is the speedup if computing rows were all that took time.
    """
    from cacheblend_rag.bench import TTFTBench, TTFTSetting

    make_quiet()
    setting = TTFTSetting(
        shape=shape,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        ratios=parse_ratios(ratios),
        selectors=tuple(name.strip() for name in selectors.split(",")),
        repeats=repeats,
        device=device,
        dtype=dtype or ("float32" if device == "cpu" else "bfloat16"),
        seed=seed,
    )
    screen = console(stderr=True)
    with screen.status("making the model and its chunks") as status:
        bench = TTFTBench(setting)
        rows = bench.measure(lambda done, total: status.update(f"measuring, {done} of {total}"))
    lines = [
        (
            row.method,
            row.selector,
            row.recompute_ratio,
            f"{row.charged_ratio:.3f}",
            say_seconds(row.ttft_s),
            f"{say_seconds(row.ttft_min_s)} to {say_seconds(row.ttft_max_s)}",
            f"{row.speedup:.2f}x",
            f"{row.limit:.1f}x",
        )
        for row in rows
    ]
    title = (
        f"{shape}, {setting.dtype} on {device}: {chunks} chunks of {chunk_tokens} tokens and a question of {question_tokens}, "
        f"median of {repeats}"
    )
    columns = ("method", "selector", "ratio", "charged", "first token", "range", "speedup", "limit")
    show_table(title, columns, lines, text_columns=2)
    facts = asdict(setting) | {"prompt_tokens": len(bench.token_ids), "context_tokens": bench.context_tokens}
    shared = {"shape": shape, "device": device, "dtype": setting.dtype, "prompt_tokens": len(bench.token_ids)}
    write_json(
        json_file, "bench ttft", [asdict(row) | shared for row in rows], model=f"random weights, {shape}", setting=facts
    )


@bench_app.command()
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
    from cacheblend_rag.bench.index import IndexBench

    bench = IndexBench(parse_counts(entries), folder, lookups)
    with console(stderr=True).status("making the stores") as status:
        rows = bench.measure(lambda done, total: status.update(f"measuring, {done} of {total}"))
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
