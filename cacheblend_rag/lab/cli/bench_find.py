"""``cacheblend-rag bench find``: finding stored chunks in plain prompts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import console, make_quiet, say_bytes, say_seconds, show_table, write_json
from cacheblend_rag.extras import needs_extra

__all__ = ["find"]


def find(
    chunks: Annotated[int, typer.Option(min=16, help="Stored chunks.")] = 100_000,
    prompts: Annotated[int, typer.Option(min=100, help="Prompts that are looked through.")] = 500,
    prompt_chars: Annotated[
        int, typer.Option(min=1, help="Characters of each prompt, at least; 36000 are 8000 tokens.")
    ] = 36_000,
    heading: Annotated[bool, typer.Option("--heading", help="Have all chunks begin with the same line.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure what LangChain calls wait while stored chunks are looked for in their prompts.

    The prompts hold 0 to 16 chunks and as many with one character changed, between other text.
    """
    with needs_extra("langchain", "bench find"):
        from cacheblend_rag.lab.bench.find import FindBench, FindSetting

    make_quiet()
    setting = FindSetting(chunks=chunks, prompts=prompts, prompt_chars=prompt_chars, heading=heading, seed=seed)
    with console(stderr=True).status("making the texts") as status:
        row = FindBench(setting).measure(status.update)
    lines = [
        ("found", f"{row.found} of {row.placed}"),
        ("taken by mistake", f"{row.false_hits}, of {row.edited} with one character changed"),
        ("added to a call, median", say_seconds(row.p50_s)),
        ("added to a call, 99 %", say_seconds(row.p99_s)),
        ("added to a call, most", say_seconds(row.max_s)),
        ("first call", say_seconds(row.open_s)),
        ("memory", say_bytes(row.rss_bytes)),
        ("first call after a chunk was added", say_seconds(row.after_add_s)),
        ("first call after another engine added one", say_seconds(row.after_other_s)),
        ("first call after 100 were deleted", say_seconds(row.after_delete_s)),
    ]
    title = f"{chunks:,} chunks, {prompts} prompts of {row.mean_prompt_chars:,.0f} characters on average"
    show_table(title, ("", "figure"), lines, text_columns=1)
    write_json(json_file, "bench find", [asdict(row)], setting=asdict(setting))
