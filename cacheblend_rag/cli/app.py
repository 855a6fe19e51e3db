"""The command and its subcommands, those that other packages add by the entry points ``cacheblend_rag.commands`` included.

Each subcommand imports what it needs when it is run.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from cacheblend_rag import __version__
from cacheblend_rag.cli.ask import ask, chat
from cacheblend_rag.cli.models import models
from cacheblend_rag.cli.output import on_interrupt
from cacheblend_rag.cli.store import store_app
from cacheblend_rag.cli.warm import warm
from cacheblend_rag.errors import CacheBlendError, ConfigError, UnknownChunkError, how_to_install

__all__ = ["app"]

# Before torch is loaded, which reads it once: threads that wait for others leave their core to them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What brings the commands that are not in this distribution.
_ELSEWHERE = {
    **dict.fromkeys(("bench", "demo"), "lab"),
    **dict.fromkeys(("calibrate", "inspect"), "attachments"),
    **dict.fromkeys(("keys", "serve"), "serve"),
    "pml": "pml",
    "warm-ray": "ray",
}


class _Commands(TyperGroup):
    """Turns the library's own errors into one line and an exit code; anything else is a bug and keeps its traceback."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the subcommand; where it is another distribution's, say what to install."""
        if args and args[0] in _ELSEWHERE and args[0] not in self.commands:
            typer.echo(
                f"error: the command {args[0]} comes with another package: {how_to_install(_ELSEWHERE[args[0]])}",
                err=True,
            )
            raise typer.Exit(2)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        try:
            with on_interrupt(lambda: "it was not finished; run the same command again"):
                return super().invoke(ctx)
        except CacheBlendError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2 if isinstance(error, ConfigError | UnknownChunkError) else 1) from error


app = typer.Typer(
    name="cacheblend-rag",
    cls=_Commands,
    help="Blended prefill for retrieval-augmented generation: chunk KV computed once, reused in any order.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cacheblend-rag {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    del version


for _command in (warm, ask, chat, models):
    app.command()(_command)
app.add_typer(store_app, name="store")
for _entry in sorted(entry_points(group="cacheblend_rag.commands"), key=lambda entry: entry.name):
    _added = _entry.load()
    if isinstance(_added, typer.Typer):
        app.add_typer(_added, name=_entry.name)
    else:
        app.command(_entry.name)(_added)
