"""``cacheblend-rag models``: on which models blending is exact, and what it does in each layer of one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli.options import MarkdownOption
from cacheblend_rag.cli.output import console, make_quiet, progress_bar, show_table
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from cacheblend_rag.model import Capability

__all__ = ["models"]


def models(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A family as transformers names it, a Hugging Face id, or a folder."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every family of the installed transformers.")] = False,
    markdown: MarkdownOption = None,
) -> None:
    """Say on which models blending is exact, and why not on the others, by running them.

    Families are run as tiny random models, on the CPU, about a second each. Of a single model, or family, every layer is shown.
    """
    if (name is None) != everything:
        raise ConfigError("give the name of one model, or --all for every family")
    make_quiet()
    if name is None:
        _show_all(markdown)
    else:
        _show_one(name, markdown)


def _show_all(markdown: Path | None) -> None:
    from cacheblend_rag.families import families, prove_family, table_lines

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
    from cacheblend_rag.families import families, prove_family, tiny_config, tiny_model
    from cacheblend_rag.model import capability

    if name in families():
        with _no_warnings():
            row = prove_family(name)
        verdict = row.verdict
        seen = capability(tiny_model(tiny_config(name))) if row.is_exact else None
    else:
        verdict, seen = _loaded(name)
    console().print(f"{name}: {verdict}", soft_wrap=True, markup=False)
    if seen is None:
        return
    columns = ("layer", "attention", "positions in its KV", "blending")
    lines = [(str(layer.number), layer.attention, layer.positions, layer.blending) for layer in seen.layers]
    show_table(seen.model, columns, lines, text_columns=4)
    if markdown is not None:
        rows = ["| " + " | ".join(line) + " |" for line in (columns, ("---",) * 4, *lines)]
        markdown.write_text("\n".join([f"{name}: {verdict}", "", *rows, ""]), encoding="utf-8")


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


def _loaded(name: str) -> tuple[str, Capability]:
    """Load a model and inspect it as an engine does."""
    from cacheblend_rag.cli.models import open_engine

    with open_engine(name) as engine:
        reason = engine.unsupported_reason
        return "exact" if reason is None else f"refused: {reason}", engine.capability()
