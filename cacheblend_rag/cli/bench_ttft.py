"""``cacheblend-rag bench ttft``: the time to the first token."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cacheblend_rag.cli.options import FolderOption, JsonOption, ShapeOption
from cacheblend_rag.cli.output import (
    console,
    make_quiet,
    parse_ratios,
    plain_values,
    say_cached,
    say_seconds,
    show_table,
    write_json,
)

__all__ = ["ttft"]


def ttft(
    shape: ShapeOption = "qwen2-0.5b",
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
            help="Where stored KV is read from, comma-separated: ram, disk (the page cache is emptied of it before each run), or "
            "a rate such as 100MB/s for an emulated device; with -no-pipeline behind it, loaded without the pipeline.",
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
    "limit" is the speedup if computing rows were all that took time, "of limit" how much of it is there.
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
        cached = bench.cached_share_after_drop()
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
            f"{row.speedup / row.limit:.2f}",
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
        "of limit",
        "of ram",
        "waited",
    )
    show_table(title, columns, lines, text_columns=2)
    say_cached(cached)
    facts = plain_values(asdict(setting)) | {
        "prompt_tokens": len(bench.token_ids),
        "context_tokens": bench.context_tokens,
        "cached_share_after_drop": cached,
    }
    shared = {"shape": shape, "device": device, "dtype": setting.dtype, "prompt_tokens": len(bench.token_ids)}
    write_json(
        json_file, "bench ttft", [asdict(row) | shared for row in rows], model=f"random weights, {shape}", setting=facts
    )
