"""``cacheblend-rag bench codecs``: bytes, error and speed of each codec."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import say_bytes, show_table, write_json
from cacheblend_rag.lab.cli.bench_output import measuring
from cacheblend_rag.lab.cli.options import ShapeOption

__all__ = ["codecs"]


def codecs(
    shape: ShapeOption = "qwen2-0.5b",
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the chunk.")] = 512,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each runs every codec once. The fastest counts.")] = 9,
    seed: Annotated[int, typer.Option(help="Seed of the KV.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure what each codec makes of a chunk's KV: bytes of its file, error, and speed beside copying the KV in memory.

    The KV is drawn from a normal distribution; `eval reference --codecs` says what a codec does to answers.
    """
    from cacheblend_rag.lab.bench import CodecSetting, measure_codecs

    setting = CodecSetting(shape=shape, chunk_tokens=chunk_tokens, dtype=dtype, repeats=repeats, seed=seed)
    with measuring("measuring") as progress:
        rows = measure_codecs(setting, progress)
    lines = [
        (
            row.codec,
            say_bytes(row.file_bytes),
            f"{row.share_of_float16:.3f}",
            f"{row.rms_error:.4f}",
            f"{row.max_error:.4f}",
            f"{say_bytes(row.pack_bytes_per_s)}/s",
            f"{say_bytes(row.unpack_bytes_per_s)}/s",
        )
        for row in rows
    ]
    title = (
        f"{shape}, a chunk of {chunk_tokens} tokens in {dtype}, fastest of {repeats} rounds; "
        f"copying runs at {say_bytes(rows[0].copy_bytes_per_s)}/s"
    )
    columns = ("codec", "file", "of float16", "rms error", "max error", "pack", "unpack")
    show_table(title, columns, lines)
    write_json(
        json_file, "bench codecs", [asdict(row) for row in rows], model=f"random KV, {shape}", setting=asdict(setting)
    )
