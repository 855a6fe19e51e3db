"""``cacheblend-rag bench tpot``: the time per output token and the KV held, with and without eviction."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption, ShapeOption
from cacheblend_rag.cli.output import (
    console,
    make_quiet,
    parse_capacities,
    plain_values,
    say_bytes,
    say_seconds,
    show_table,
    write_json,
)

__all__ = ["tpot"]


def tpot(
    shape: ShapeOption = "qwen2-0.5b",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in the prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each chunk.")] = 512,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the question.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated.")] = 32,
    capacities: Annotated[
        str,
        typer.Option(help="Context KV that is kept, comma-separated: a share (0.25) or a number of tokens (512)."),
    ] = "0.25",
    methods: Annotated[
        str, typer.Option(help="How the prompt is prefilled, comma-separated: full, blend.")
    ] = "full,blend",
    ratio: Annotated[float, typer.Option(help="Recompute ratio of the blend.")] = 0.15,
    selector: Annotated[str, typer.Option(help="Selector of the blend.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each runs every method once. The median counts.")] = 5,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; by default float32 on the CPU, else bfloat16.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure the time per output token and the KV held, by full prefill and blend, with all KV and with evicted KV (SnapKV).

    "faster" and "added" compare with the same method without eviction, round by round.
    """
    from cacheblend_rag.bench import TPOTBench, TPOTSetting

    make_quiet()
    setting = TPOTSetting(
        shape=shape,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        output_tokens=output_tokens,
        capacities=parse_capacities(capacities),
        methods=tuple(name.strip() for name in methods.split(",")),
        ratio=ratio,
        selector=selector,
        repeats=repeats,
        device=device,
        dtype=dtype or ("float32" if device == "cpu" else "bfloat16"),
        seed=seed,
    )
    with console(stderr=True).status("making the model and its chunks") as status, TPOTBench(setting) as bench:
        rows = bench.measure(lambda done, total: status.update(f"measuring, {done} of {total}"))
    lines = [
        (
            row.method,
            "all" if row.kv_capacity is None else row.kv_capacity,
            row.evicted_tokens,
            say_bytes(row.kv_bytes),
            say_seconds(row.tpot_s),
            f"{say_seconds(row.tpot_min_s)} to {say_seconds(row.tpot_max_s)}",
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
    facts = plain_values(asdict(setting)) | {"prompt_tokens": len(bench.token_ids)}
    shared = {"shape": shape, "device": device, "dtype": setting.dtype, "prompt_tokens": len(bench.token_ids)}
    write_json(
        json_file, "bench tpot", [asdict(row) | shared for row in rows], model=f"random weights, {shape}", setting=facts
    )
