"""``cacheblend-rag bench encode``: how fast chunks are added."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import make_quiet, say_bytes, say_seconds, show_table
from cacheblend_rag.lab.cli.bench_output import measuring, say_range, write_bench
from cacheblend_rag.lab.cli.options import (
    ChunkTokensOption,
    DeviceOption,
    FolderOption,
    RepeatsOption,
    SeedOption,
    ShapeOption,
    WeightsOption,
    weights_dtype,
)

__all__ = ["encode"]


def encode(
    shape: ShapeOption = "qwen2-0.5b",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks to add.")] = 64,
    chunk_tokens: ChunkTokensOption = 512,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the encoding prefix; 1 is a BOS alone.")] = 1,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Most tokens encoded in one batch.")] = 4096,
    document_chunks: Annotated[
        int, typer.Option(min=0, help="Chunks of a document, in which they are encoded; 0: alone.")
    ] = 0,
    overlap: Annotated[int, typer.Option(min=0, help="Tokens that chunks of a document share.")] = 0,
    context_tokens: Annotated[
        int, typer.Option(min=0, help="Most tokens of a document that are read together; 0: all.")
    ] = 0,
    singly: Annotated[
        bool, typer.Option(help="Add the chunks of documents one by one too, which is slow where documents are long.")
    ] = True,
    repeats: RepeatsOption = 3,
    device: DeviceOption = "cpu",
    dtype: WeightsOption = None,
    seed: SeedOption = 0,
    folder: FolderOption = None,
    json_file: JsonOption = None,
) -> None:
    """Measure how fast chunks are added, into RAM and into a folder, against the model's own batched forward, in alternation.

    "share" is the forward's time over that of adding the same chunks, in the same round.
    """
    from cacheblend_rag.lab.bench import EncodeBench, EncodeSetting

    make_quiet()
    setting = EncodeSetting(
        shape=shape,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        prefix_tokens=prefix_tokens,
        batch_tokens=batch_tokens,
        document_chunks=document_chunks,
        overlap=overlap,
        context_tokens=context_tokens or None,
        singly=singly,
        repeats=repeats,
        device=device,
        dtype=weights_dtype(dtype, device),
        seed=seed,
        folder=folder,
    )
    with measuring("making the model and its chunks") as progress:
        rows = EncodeBench(setting).measure(progress)
    lines = [
        (
            row.method,
            f"{row.tokens_per_s:.0f}",
            f"{row.share:.3f}",
            say_seconds(row.seconds),
            say_range(row.seconds_min, row.seconds_max),
            say_seconds(row.cpu_s),
            say_bytes(row.kv_bytes),
        )
        for row in rows
    ]
    inside = f", {document_chunks} a document, {overlap} shared," if document_chunks else ""
    title = (
        f"{shape}, {setting.dtype} on {device}: {chunks} chunks of {chunk_tokens} tokens{inside} behind a prefix of "
        f"{prefix_tokens}, in {rows[0].batches} batches, median of {repeats}"
    )
    show_table(title, ("method", "tokens/s", "share", "time", "range", "CPU time", "KV"), lines)
    write_bench(json_file, "bench encode", setting, rows)
