"""``cacheblend-rag pml``: schemas and prompts in the prompt markup language."""

from __future__ import annotations

import typer

from cacheblend_rag.cli.pml_layout import check, show
from cacheblend_rag.cli.pml_run import run

__all__ = ["pml_app"]

pml_app = typer.Typer(
    help="Prompts made of reusable modules, in the prompt markup language.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for command in (check, show, run):
    pml_app.command()(command)
