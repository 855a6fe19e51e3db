"""``cacheblend-rag bench``: speed; a command for each of `cacheblend_lab.bench.settings.SETTINGS`, and their figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from inspect import Parameter
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from cacheblend_attachments.cli.profile import (
    TYPICAL_CHUNKS,
    MeasuredStoreOption,
    PredictedTokensOption,
    SecondsOption,
    predicted_works,
)
from cacheblend_lab.bench.settings import SETTINGS, BenchSetting, options_of
from cacheblend_lab.cli.cluster import cluster_app
from cacheblend_lab.cli.options import command_of
from cacheblend_lab.figures import needs_drawing
from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import JsonOption, ModelOption
from cacheblend_rag.cli.output import console, make_quiet, show_table, write_json
from cacheblend_rag.cli.store import kv_folder_of
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.extras import needs_extra

if TYPE_CHECKING:
    from cacheblend_lab.bench.auto import AutoRun

__all__ = ["bench_app"]

bench_app = typer.Typer(
    help="Measure speed: on random weights at the shapes of real models, of the store's index, and of LangChain calls.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _command(name: str, setting: type[BenchSetting]) -> Callable[..., None]:
    """Return a bench's command: its setting's fields as options, and the JSON file."""
    options, hints = options_of(setting), get_type_hints(setting)
    defaults = {each.name: each.default for each in fields(setting)}
    parameters = []
    for field, (option, written) in options.items():
        kind, default = hints[field], defaults[field]
        if written is not None:
            kind, default = written.kind, written.default_of(default)
        elif default == "":
            # Left out, it follows from other options.
            kind, default = kind | None, None
        parameters.append(Parameter(field, Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option], default=default))
    parameters.append(Parameter("json_file", Parameter.KEYWORD_ONLY, annotation=JsonOption, default=None))

    def run(json_file: Path | None, **given: Any) -> None:
        values = {}
        for field, value in given.items():
            written = options[field][1]
            values[field] = value if written is None else written.read(value)
        _run(name, setting(**{field: value for field, value in values.items() if value is not None}), json_file)

    return command_of(parameters, run, setting.__doc__)


def _run(name: str, setting: BenchSetting, json_file: Path | None) -> None:
    """Set a bench up, measure, show the table and write the file."""
    make_quiet()
    with needs_extra(setting.extra, f"bench {name}") if setting.extra else nullcontext():
        bench_type = resolve_name(f"cacheblend_lab.bench.{setting.bench}")
    with console(stderr=True).status(setting.preparing) as status, bench_type(setting) as bench:
        rows = bench.measure(status.update)
        figures = bench.figures(rows)
    show_table(bench.title(rows), *bench.table(rows), text_columns=bench.text_columns)
    if cached := figures["setting"].get("cached_share_after_drop"):
        console().print(
            f"{cached:.0%} of the files stayed in the page cache when it was emptied: these are not times of the disk",
            style="yellow",
        )
    write_json(json_file, f"bench {name}", **figures)


for _name, _setting in SETTINGS.items():
    bench_app.command(_name)(_command(_name, _setting))
bench_app.add_typer(cluster_app, name="cluster")


@bench_app.command()
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
    from cacheblend_attachments import AutoRatio
    from cacheblend_lab.bench.plots import plot_profile, plot_runs

    needs_drawing()
    measured_runs = _read_runs(runs)
    with open_engine(model, store=kv_folder_of(store)) as engine:
        with console(stderr=True).status("measuring") as status:
            auto = engine.attach(AutoRatio())
            found = auto.profile(budget_s=seconds, progress=lambda what: status.update(f"measuring: {what}"))
        works = predicted_works(engine, found, chunk_tokens)
    typical = {
        tier if codec == "native" else f"{tier}, {codec}": work
        for (tier, codec, chunks), work in works.items()
        if chunks == TYPICAL_CHUNKS
    }
    files, lacks = [plot_profile(found, typical, auto.quality_ratio, out)], list[str]()
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
    from cacheblend_lab.bench.auto import AutoRun

    if path is None:
        return []
    try:
        return [AutoRun(**run) for run in json.loads(path.read_text(encoding="utf-8"))["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no runs ({error}); give what `cacheblend-rag bench auto --json` wrote"
        ) from error
