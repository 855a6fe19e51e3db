"""``cacheblend-rag bench auto``: whether "auto" finds the measured optimum."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import (
    console,
    make_quiet,
    parse_names,
    parse_ratios,
    say_seconds,
    show_table,
    write_json,
)
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lab.cli.options import (
    DeviceOption,
    QuestionTokensOption,
    RepeatsOption,
    SeedOption,
    ShapeOption,
    WeightsOption,
    weights_dtype,
)

__all__ = ["auto"]


def auto(
    shape: ShapeOption = "qwen2-0.5b",
    tiers: Annotated[
        str, typer.Option(help="ram, disk, or a rate such as 200MB/s for an emulated device; comma-separated.")
    ] = "ram,disk,200MB/s",
    prompts: Annotated[
        str, typer.Option(help="Prompts as chunks x tokens, comma-separated.")
    ] = "1x32,2x128,6x256,6x512",
    question_tokens: QuestionTokensOption = 32,
    ratios: Annotated[str, typer.Option(help="Fixed ratios to compare with, comma-separated.")] = "0.15,0.3,0.5,0.8",
    quality_ratio: Annotated[float, typer.Option(help="The quality floor: no smaller ratio is compared.")] = 0.15,
    repeats: RepeatsOption = 3,
    profile_seconds: Annotated[
        float, typer.Option(min=0.1, help="About how long each tier's profile may take.")
    ] = 20.0,
    device: DeviceOption = "cpu",
    dtype: WeightsOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Compare recompute_ratio="auto" with full prefill and fixed ratios, over tiers and prompts, in alternation.

    "regret" is how much longer auto took than the best setting whose ratio is not under the quality floor; "of the choice" is how
    much longer what it chose took when asked for as a fixed setting: 0 where it chose the best one.
    """
    from cacheblend_rag.lab.bench import AutoBench, AutoSetting

    make_quiet()
    setting = AutoSetting(
        shape=shape,
        tiers=parse_names(tiers),
        prompts=_parse_prompts(prompts),
        question_tokens=question_tokens,
        ratios=parse_ratios(ratios),
        quality_ratio=quality_ratio,
        repeats=repeats,
        profile_s=profile_seconds,
        device=device,
        dtype=weights_dtype(dtype, device),
        seed=seed,
    )
    with console(stderr=True).status("making the model") as status:
        bench = AutoBench(setting)
        rows = bench.measure(lambda what: status.update(f"measuring {what}"))
    lines = [
        (
            row.tier,
            row.best_method,
            row.auto_choice,
            row.chunks,
            row.chunk_tokens,
            say_seconds(row.best_ttft_s),
            say_seconds(row.auto_ttft_s),
            f"{row.regret:+.1%}",
            f"{row.choice_regret:+.1%}",
        )
        for row in rows
    ]
    title = f"{shape}, {setting.dtype} on {device}: auto against the best measured setting, median of {repeats}"
    columns = ("tier", "best", "auto", "chunks", "tokens each", "best first token", "auto's", "regret", "of the choice")
    show_table(title, columns, lines, text_columns=3)
    write_json(
        json_file,
        "bench auto",
        [asdict(row) for row in rows],
        model=f"random weights, {shape}",
        setting=asdict(setting),
        runs=[asdict(run) for run in bench.runs],
        profiles={tier: asdict(measured) for tier, measured in bench.profiles.items()},
    )


def _parse_prompts(text: str) -> tuple[tuple[int, int], ...]:
    prompts = []
    for part in text.split(","):
        chunks, _, tokens = part.partition("x")
        try:
            prompts.append((int(chunks), int(tokens)))
        except ValueError:
            raise ConfigError(f"{part.strip()!r} is no prompt; write chunks x tokens, as in 1x32,6x512") from None
    return tuple(prompts)
