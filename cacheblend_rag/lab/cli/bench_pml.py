"""``cacheblend-rag bench pml``: the time to the first token of a schema's prompt."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import make_quiet, parse_names, say_seconds, show_table
from cacheblend_rag.lab.cli.bench_output import measuring, say_cached, say_range, write_bench
from cacheblend_rag.lab.cli.options import (
    DeviceOption,
    FolderOption,
    RepeatsOption,
    SeedOption,
    ShapeOption,
    WeightsOption,
    weights_dtype,
)

__all__ = ["pml"]


def pml(
    shape: ShapeOption = "qwen2-0.5b",
    modules: Annotated[int, typer.Option(min=1, help="Modules of the schema, all of them imported.")] = 10,
    module_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each module.")] = 500,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that are not the schema's.")] = 50,
    argument_tokens: Annotated[
        int, typer.Option(min=0, help="How many of them are the argument of a parameter in the first module.")
    ] = 10,
    selectors: Annotated[
        str, typer.Option(help="Selectors, comma-separated; none recomputes nothing, as in Prompt Cache.")
    ] = "none",
    ratio: Annotated[float, typer.Option(min=0, max=1, help="Recompute ratio of the other selectors.")] = 0.15,
    tier: Annotated[str, typer.Option(help="ram, or disk (the page cache is emptied of it before each run).")] = "ram",
    folder: FolderOption = None,
    repeats: RepeatsOption = 5,
    device: DeviceOption = "cpu",
    dtype: WeightsOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure the time to the first token of a prompt made of schema modules, against the model's own prefill of it."""
    from cacheblend_rag.lab.bench.pml import PMLBench, PMLSetting

    make_quiet()
    setting = PMLSetting(
        shape=shape,
        modules=modules,
        module_tokens=module_tokens,
        new_tokens=new_tokens,
        argument_tokens=argument_tokens,
        selectors=parse_names(selectors),
        ratio=ratio,
        tier=tier,
        folder=folder,
        repeats=repeats,
        device=device,
        dtype=weights_dtype(dtype, device),
        seed=seed,
    )
    with measuring("making the model and loading the schema") as progress, PMLBench(setting) as bench:
        rows = bench.measure(progress)
        cached = bench.cached_share_after_drop()
        layout = bench.layout
    lines = [
        (
            row.method,
            row.selector,
            f"{row.charged_ratio:.3f}",
            say_seconds(row.ttft_s),
            say_range(row.ttft_min_s, row.ttft_max_s),
            f"{row.speedup:.1f}x",
            None if row.load_s is None else say_seconds(row.load_s),
        )
        for row in rows
    ]
    title = (
        f"{shape}, {setting.dtype} on {device}, from {tier}: {modules} modules of {module_tokens} tokens and {new_tokens} new "
        f"tokens, median of {repeats}"
    )
    show_table(
        title, ("method", "selector", "charged", "first token", "range", "speedup", "waited"), lines, text_columns=2
    )
    say_cached(cached)
    write_bench(
        json_file,
        "bench pml",
        setting,
        rows,
        {"tier": tier, "prompt_tokens": len(layout)},
        prompt_tokens=len(layout),
        cached_tokens=layout.context_tokens,
        cached_share_after_drop=cached,
    )
