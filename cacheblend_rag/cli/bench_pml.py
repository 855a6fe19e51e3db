"""``cacheblend-rag bench pml``: the time to the first token of a schema's prompt."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cacheblend_rag.cli.options import FolderOption, JsonOption, ShapeOption
from cacheblend_rag.cli.output import (
    console,
    make_quiet,
    plain_values,
    say_cached,
    say_seconds,
    show_table,
    write_json,
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
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each runs every method once. The median counts.")] = 5,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; by default float32 on the CPU, else bfloat16.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure the time to the first token of a prompt made of schema modules, against the model's own prefill of it."""
    from cacheblend_rag.bench.pml import PMLBench, PMLSetting

    make_quiet()
    setting = PMLSetting(
        shape=shape,
        modules=modules,
        module_tokens=module_tokens,
        new_tokens=new_tokens,
        argument_tokens=argument_tokens,
        selectors=tuple(name.strip() for name in selectors.split(",")),
        ratio=ratio,
        tier=tier,
        folder=folder,
        repeats=repeats,
        device=device,
        dtype=dtype or ("float32" if device == "cpu" else "bfloat16"),
        seed=seed,
    )
    screen = console(stderr=True)
    with screen.status("making the model and loading the schema") as status, PMLBench(setting) as bench:
        rows = bench.measure(lambda done, total: status.update(f"measuring, {done} of {total}"))
        cached = bench.cached_share_after_drop()
        layout = bench.layout
    lines = [
        (
            row.method,
            row.selector,
            f"{row.charged_ratio:.3f}",
            say_seconds(row.ttft_s),
            f"{say_seconds(row.ttft_min_s)} to {say_seconds(row.ttft_max_s)}",
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
    facts = plain_values(asdict(setting)) | {
        "prompt_tokens": len(layout),
        "cached_tokens": layout.context_tokens,
        "cached_share_after_drop": cached,
    }
    shared = {"shape": shape, "device": device, "dtype": setting.dtype, "tier": tier, "prompt_tokens": len(layout)}
    write_json(
        json_file, "bench pml", [asdict(row) | shared for row in rows], model=f"random weights, {shape}", setting=facts
    )
