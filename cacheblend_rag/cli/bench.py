"""``cacheblend-rag bench``: speed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import (
    console,
    make_quiet,
    parse_ratios,
    say_bytes,
    say_seconds,
    show_table,
    write_json,
)
from cacheblend_rag.errors import ConfigError

__all__ = ["bench_app"]

bench_app = typer.Typer(
    help="Measure speed on random weights at the shapes of real models.", no_args_is_help=True, rich_markup_mode=None
)


FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="DIR",
        exists=True,
        file_okay=False,
        help="Where the measured files are written for the time of the measurement; by default with other temporary files.",
    ),
]


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
    tiers: Annotated[
        str,
        typer.Option(
            "--tiers",
            "--tier",
            help="Where stored KV is read from, comma-separated: ram, disk (the page cache is emptied of it before each run), "
            "ram-no-pipeline, disk-no-pipeline.",
        ),
    ] = "ram",
    folder: FolderOption = None,
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
        tiers=tuple(name.strip() for name in tiers.split(",")),
        folder=folder,
        repeats=repeats,
        device=device,
        dtype=dtype or ("float32" if device == "cpu" else "bfloat16"),
        seed=seed,
    )
    screen = console(stderr=True)
    with screen.status("making the model and its chunks") as status, TTFTBench(setting) as bench:
        rows = bench.measure(lambda done, total: status.update(f"measuring, {done} of {total}"))
        cached = bench.cached_share
    lines = [
        (
            row.method,
            row.selector,
            row.recompute_ratio,
            row.tier if row.pipeline in (None, True) else f"{row.tier}, no pipeline",
            f"{row.charged_ratio:.3f}",
            say_seconds(row.ttft_s),
            f"{say_seconds(row.ttft_min_s)} to {say_seconds(row.ttft_max_s)}",
            f"{row.speedup:.2f}x",
            f"{row.limit:.1f}x",
            None if row.over_ram is None else f"{row.over_ram:.2f}x",
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
        "of ram",
        "waited",
    )
    show_table(title, columns, lines, text_columns=2)
    _say_cached(cached)
    facts = _plain(asdict(setting)) | {
        "prompt_tokens": len(bench.token_ids),
        "context_tokens": bench.context_tokens,
        "cached_share_after_drop": cached,
    }
    shared = {"shape": shape, "device": device, "dtype": setting.dtype, "prompt_tokens": len(bench.token_ids)}
    write_json(
        json_file, "bench ttft", [asdict(row) | shared for row in rows], model=f"random weights, {shape}", setting=facts
    )


@bench_app.command()
def load(
    shape: Annotated[str, typer.Option(help="The shape whose KV is loaded, as for ttft.")] = "qwen2-0.5b",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each chunk.")] = 512,
    threads: Annotated[
        str, typer.Option(help="Numbers of loader threads, comma-separated; 0 is the pipeline switched off.")
    ] = "0,1,2,4",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each runs every method once. The median counts.")] = 5,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    folder: FolderOption = None,
    json_file: JsonOption = None,
) -> None:
    """Measure how fast the loader reads, checks and assembles stored KV, beside plain reads of the same files, in alternation.

    The page cache is emptied of the files before each run.
    """
    from cacheblend_rag.bench import LoadBench, LoadSetting

    make_quiet()
    setting = LoadSetting(
        shape=shape,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        threads=_parse_threads(threads),
        repeats=repeats,
        dtype=dtype,
        folder=folder,
    )
    screen = console(stderr=True)
    with screen.status("making the files") as status, LoadBench(setting) as bench:
        rows = bench.measure(lambda done, total: status.update(f"measuring, {done} of {total}"))
    lines = [
        (
            row.method,
            row.threads,
            say_seconds(row.seconds),
            f"{say_seconds(row.seconds_min)} to {say_seconds(row.seconds_max)}",
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
    _say_cached(bench.cached_share_after_drop)
    facts = _plain(asdict(setting)) | {
        "file_bytes": bench.file_bytes,
        "cached_share_after_drop": bench.cached_share_after_drop,
    }
    shared = {"shape": shape, "dtype": dtype, "file_bytes": bench.file_bytes}
    write_json(
        json_file, "bench load", [asdict(row) | shared for row in rows], model=f"random weights, {shape}", setting=facts
    )


def _say_cached(share: float | None) -> None:
    if share:
        console().print(
            f"{share:.0%} of the files stayed in the page cache when it was emptied: these are not times of the disk",
            style="yellow",
        )


def _plain(setting: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in setting.items()}


def _parse_threads(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"{text!r} is no list of whole numbers; write numbers of threads like 0,1,2,4")
    return tuple(int(part) for part in parts)
