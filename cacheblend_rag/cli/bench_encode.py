"""``cacheblend-rag bench encode``: how fast chunks are added."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption, ShapeOption
from cacheblend_rag.cli.output import console, make_quiet, plain_values, say_bytes, say_seconds, show_table, write_json

__all__ = ["encode"]


def encode(
    shape: ShapeOption = "qwen2-0.5b",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks to add.")] = 64,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each chunk.")] = 512,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the encoding prefix; 1 is a BOS alone.")] = 1,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Most tokens encoded in one batch.")] = 4096,
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds; each runs every method once.")] = 3,
    device: Annotated[str, typer.Option(help="Where the model runs: cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; by default float32 on the CPU, else bfloat16.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    folder: Annotated[
        Path | None, typer.Option(help="Where a store is made and removed again; by default where temporary files go.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure how fast chunks are added, into RAM and into a folder, against the model's own batched forward, in alternation.

    "share" is the forward's time over that of adding the same chunks, in the same round.
    """
    from cacheblend_rag.bench import EncodeBench, EncodeSetting

    make_quiet()
    setting = EncodeSetting(
        shape=shape,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        prefix_tokens=prefix_tokens,
        batch_tokens=batch_tokens,
        repeats=repeats,
        device=device,
        dtype=dtype or ("float32" if device == "cpu" else "bfloat16"),
        seed=seed,
        folder=folder,
    )
    screen = console(stderr=True)
    with screen.status("making the model and its chunks") as status:
        rows = EncodeBench(setting).measure(lambda done, total: status.update(f"measuring, {done} of {total}"))
    lines = [
        (
            row.method,
            f"{row.tokens_per_s:.0f}",
            f"{row.share:.3f}",
            say_seconds(row.seconds),
            f"{say_seconds(row.seconds_min)} to {say_seconds(row.seconds_max)}",
            say_seconds(row.cpu_s),
            say_bytes(row.kv_bytes),
        )
        for row in rows
    ]
    title = (
        f"{shape}, {setting.dtype} on {device}: {chunks} chunks of {chunk_tokens} tokens behind a prefix of {prefix_tokens}, "
        f"in {rows[0].batches} batches, median of {repeats}"
    )
    show_table(title, ("method", "tokens/s", "share", "time", "range", "CPU time", "KV"), lines)
    shared = {"shape": shape, "device": device, "dtype": setting.dtype}
    write_json(
        json_file,
        "bench encode",
        [asdict(row) | shared for row in rows],
        model=f"random weights, {shape}",
        setting=plain_values(asdict(setting)),
    )
