"""``cacheblend-rag bench figures``: CacheBlend's figures of ratios and devices, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import ModelOption
from cacheblend_rag.cli.output import console
from cacheblend_rag.cli.profile import (
    TYPICAL_CHUNKS,
    MeasuredStoreOption,
    PredictedTokensOption,
    SecondsOption,
    predicted_works,
)
from cacheblend_rag.cli.store import kv_folder_of
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from cacheblend_rag.lab.bench import AutoRun

__all__ = ["figures"]


def figures(
    out: Annotated[Path, typer.Argument(metavar="DIR", file_okay=False, help="Where the figures go.")],
    model: ModelOption = "reference",
    store: MeasuredStoreOption = None,
    seconds: SecondsOption = 30.0,
    chunk_tokens: PredictedTokensOption = 256,
    runs: Annotated[
        Path | None,
        typer.Option("--runs", metavar="FILE", exists=True, dir_okay=False, help="What `bench auto --json` wrote."),
    ] = None,
) -> None:
    """Draw CacheBlend's Figure 10 from a profile of this machine, and from runs its Figures 15a, 15b and 17."""
    from cacheblend_rag.lab.bench.plots import plot_profile, plot_runs

    measured_runs = _read_runs(runs)
    with open_engine(model, store=kv_folder_of(store), recompute_ratio="auto") as engine:
        with console(stderr=True).status("measuring") as status:
            found = engine.profile(budget_s=seconds, progress=lambda what: status.update(f"measuring: {what}"))
        quality = engine.blend.quality_ratio
        works = predicted_works(engine, found, chunk_tokens)
    typical = {
        tier if codec == "native" else f"{tier}, {codec}": work
        for (tier, codec, chunks), work in works.items()
        if chunks == TYPICAL_CHUNKS
    }
    files, lacks = [plot_profile(found, typical, quality, out)], list[str]()
    if measured_runs:
        more, lacks = plot_runs(measured_runs, out)
        files += more
    else:
        lacks = ["figures 15a, 15b and 17: runs; give what `bench auto --json` wrote as --runs"]
    for file in files:
        typer.echo(f"drawn: {file}")
    for lack in lacks:
        typer.echo(f"not drawn, it lacks {lack.partition(': ')[2]}: {lack.partition(': ')[0]}")


def _read_runs(path: Path | None) -> list[AutoRun]:
    from cacheblend_rag.lab.bench import AutoRun

    if path is None:
        return []
    try:
        return [AutoRun(**run) for run in json.loads(path.read_text(encoding="utf-8"))["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no runs ({error}); give what `cacheblend-rag bench auto --json` wrote"
        ) from error
