"""``cacheblend-rag families``: on which families of models blending is exact."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.cli.models import show_layers
from cacheblend_rag.cli.options import MarkdownOption
from cacheblend_rag.cli.output import make_quiet, progress_bar, show_table
from cacheblend_rag.errors import ConfigError

__all__ = ["families"]


def families(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A family as transformers names it; by default every one it has."),
    ] = None,
    markdown: MarkdownOption = None,
) -> None:
    """Say on which families of models blending is exact, and why not on the others, by running them.

    Each is run as a tiny random model, on the CPU, about a second. Of a single family every layer is shown.
    """
    make_quiet()
    if name is None:
        _show_all(markdown)
    else:
        _show_one(name, markdown)


def _show_all(markdown: Path | None) -> None:
    from cacheblend_rag.lab.families import families, prove_family, table_lines

    names = families()
    rows = []
    with progress_bar("families") as advance:
        for number, family in enumerate(names):
            advance(number, len(names))
            rows.append(prove_family(family))
        advance(len(names), len(names))
    exact = sum(row.is_exact for row in rows)
    title = f"{exact} of {len(rows)} families exact"
    lines = [(row.family, row.verdict, row.attention, row.positions) for row in rows]
    show_table(title, ("family", "verdict", "attention", "positions"), lines, text_columns=4)
    if markdown is not None:
        markdown.write_text("\n".join([f"{title}.", "", *table_lines(rows), ""]), encoding="utf-8")
    if any(row.verdict.startswith("wrong") for row in rows):
        raise typer.Exit(1)


def _show_one(name: str, markdown: Path | None) -> None:
    from cacheblend_rag.lab.families import families, prove_family, tiny_config, tiny_model
    from cacheblend_rag.model import capability

    if name not in families():
        raise ConfigError(
            f"transformers has no family {name!r}; `cacheblend-rag families` lists them, and "
            "`cacheblend-rag models NAME` looks at one model by its Hugging Face id or folder"
        )
    with _no_warnings():
        row = prove_family(name)
    seen = capability(tiny_model(tiny_config(name))) if row.is_exact else None
    show_layers(name, row.verdict, seen, markdown)


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
