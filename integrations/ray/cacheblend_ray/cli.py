"""``cacheblend-rag warm-ray``: files encoded by the workers of a cluster."""

from __future__ import annotations

from dataclasses import asdict
from os.path import relpath
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption, ModelOption
from cacheblend_rag.cli.output import make_quiet, say_seconds, write_json
from cacheblend_rag.cli.warm import CHUNK_TOKENS

__all__ = ["warm_ray"]


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
    actors: Annotated[int | None, typer.Option(min=1, help="Number of workers; by default as many as fit.")] = None,
    gpus: Annotated[float, typer.Option(min=0, help="Share of a GPU per worker, such as 0.25.")] = 0.0,
    settings_file: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", exists=True, dir_okay=False, help="Settings, as YAML.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Compute the KV of files with Ray's workers, for servers that share a tier; no vector store is filled.

    Documents are named by their paths below PATH. KV goes to the remote and names of the settings. What is there already
    is not computed again, and nothing is deleted. RAY_ADDRESS names the cluster.
    """
    from cacheblend_rag.config import EngineConfig
    from cacheblend_rag.documents.splitter import read_files
    from cacheblend_ray.warming import warm

    config = EngineConfig() if settings_file is None else EngineConfig.from_yaml(settings_file)
    rows: list[dict[str, str]] = []
    failed = False
    for path in paths:
        texts, left_out = read_files([path])
        failed |= bool(left_out)
        for file, reason in left_out.items():
            typer.echo(f"{file} is left out: {reason}", err=True)
        # As many folders have blank ones; there is nothing to compute.
        named = {
            relpath(file, path if path.is_dir() else path.parent): text for file, text in texts.items() if text.strip()
        }
        rows += [{"document": Path(name).as_posix(), "text": text} for name, text in named.items()]
    if not rows:
        raise typer.BadParameter("there is no text in these paths; give files, or folders of .txt, .md and .rst files")
    make_quiet()
    summary = warm(
        rows, model=model, store=store, config=config, chunk_tokens=chunk_tokens, actors=actors, num_gpus=gpus
    )
    typer.echo(
        f"{summary.chunks} chunks of {summary.documents} documents: {summary.encoded} encoded; {say_seconds(summary.seconds)}"
    )
    write_json(json_file, "warm-ray", [asdict(summary)], model=model)
    for name, reason in summary.failed:
        typer.echo(f"{name} failed: {reason}", err=True)
    if failed or summary.failed:
        raise typer.Exit(1)
