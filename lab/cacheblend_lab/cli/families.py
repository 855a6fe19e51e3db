"""``cacheblend-rag families``: on which families of models blending is exact."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_lab.family_table import FamilyRow, shipped_table, table_lines
from cacheblend_rag.cli.models import show_layers
from cacheblend_rag.cli.options import JsonOption, MarkdownOption
from cacheblend_rag.cli.output import make_quiet, progress_bar, show_table, write_json
from cacheblend_rag.errors import ConfigError

__all__ = ["families"]


def families(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A family as transformers names it; by default every one it has."),
    ] = None,
    prove: Annotated[
        bool,
        typer.Option(
            "--prove", help="Run every family of the installed transformers, instead of showing the shipped table."
        ),
    ] = False,
    markdown: MarkdownOption = None,
    json_file: JsonOption = None,
) -> None:
    """Show on which families of models blending is exact, and why not on the others.

    They were run as tiny random models on the CPU; --prove runs them again, about a second each. A single family is
    always run, and every layer of it is shown.
    """
    if name is not None:
        rows = [_show_one(name, markdown)]
    else:
        made_with, rows = (version("transformers"), _prove_all()) if prove else shipped_table()
        _show_all(rows, made_with, markdown)
    write_json(json_file, "families", [asdict(row) for row in rows])
    if any(row.verdict.startswith("wrong") for row in rows):
        raise typer.Exit(1)


def _prove_all() -> list[FamilyRow]:
    from cacheblend_lab.families import families, prove_family

    make_quiet()
    names = families()
    rows = []
    with progress_bar("families") as advance, _no_warnings():
        for number, family in enumerate(names):
            advance(number, len(names))
            rows.append(prove_family(family))
        advance(len(names), len(names))
    return rows


def _show_all(rows: list[FamilyRow], made_with: str, markdown: Path | None) -> None:
    exact = sum(row.is_exact for row in rows)
    title = f"{exact} of {len(rows)} families exact"
    lines = [(row.family, row.verdict, row.attention, row.positions) for row in rows]
    show_table(
        f"{title} with transformers {made_with}", ("family", "verdict", "attention", "positions"), lines, text_columns=4
    )
    if markdown is not None:
        markdown.write_text("\n".join([f"{title}.", "", *table_lines(rows), ""]), encoding="utf-8")
    installed = version("transformers")
    if installed != made_with:
        typer.echo(f"transformers {installed} is installed: --prove runs its families", err=True)


def _show_one(name: str, markdown: Path | None) -> FamilyRow:
    from cacheblend_lab.families import families, prove_family, tiny_config, tiny_model
    from cacheblend_rag.model import capability

    make_quiet()
    if name not in families():
        raise ConfigError(
            f"transformers has no family {name!r}; `cacheblend-rag families` lists them, and "
            "`cacheblend-rag models NAME` looks at one model by its Hugging Face id or folder"
        )
    with _no_warnings():
        row = prove_family(name)
    seen = capability(tiny_model(tiny_config(name))) if row.is_exact else None
    show_layers(name, row.verdict, seen, markdown)
    return row


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Keep the engine from warning of chunks that are not stored: the proof asks for such, on purpose."""
    logger = logging.getLogger("cacheblend_rag.engine")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
