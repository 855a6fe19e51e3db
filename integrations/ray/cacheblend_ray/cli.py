"""``cacheblend-rag warm-ray``: files encoded by the workers of a cluster."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption, ModelOption
from cacheblend_rag.cli.output import make_quiet, progress_bar, say_seconds, write_json
from cacheblend_rag.cli.warm import CHUNK_TOKENS

__all__ = ["warm_ray"]

_FAILED_SHOWN = 20


def warm_ray(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", exists=True, help="Files, and folders of .txt, .md and .rst files."),
    ],
    model: ModelOption,
    store: Annotated[
        Path | None,
        typer.Option(metavar="DIR", file_okay=False, help="Where KV is kept, beside the remote of the settings."),
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a passage.")] = CHUNK_TOKENS,
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="The cluster; by default a local one, or a new one.")
    ] = None,
    actors: Annotated[int | None, typer.Option(min=1, help="Number of workers; by default as many as fit.")] = None,
    gpus: Annotated[float, typer.Option(min=0, help="Share of a GPU per worker, such as 0.25.")] = 0.0,
    settings_file: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", exists=True, dir_okay=False, help="Settings, as YAML.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Compute the KV of files with Ray's workers, for servers that share a tier; no vector store is filled.

    Documents are named by their paths below PATH. KV goes to the remote and names of the settings. What is there already
    is not computed again, and nothing is deleted.
    """
    from cacheblend_rag.config import EngineConfig
    from cacheblend_ray.warming import connect, warm

    config = EngineConfig() if settings_file is None else EngineConfig.from_yaml(settings_file)
    make_quiet()
    with connect(address), progress_bar("warming") as progress:

        def advance(done: int, total: int | None) -> None:
            progress(done, total or done)

        summary = warm(
            paths,
            model=model,
            store=store,
            config=config,
            chunk_tokens=chunk_tokens,
            actors=actors,
            num_gpus=gpus,
            progress=advance,
        )
    typer.echo(
        f"{summary.chunks} chunks of {summary.documents} documents: {summary.encoded} encoded, "
        f"{summary.unchanged} there already; {say_seconds(summary.seconds)}"
    )
    write_json(json_file, "warm-ray", [asdict(summary)], model=model)
    for name, reason in summary.failed[:_FAILED_SHOWN]:
        typer.echo(f"{name} failed: {reason}", err=True)
    if len(summary.failed) > _FAILED_SHOWN:
        typer.echo(f"and {len(summary.failed) - _FAILED_SHOWN} more", err=True)
    if summary.failed:
        raise typer.Exit(1)
