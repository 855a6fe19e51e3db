"""``cacheblend-rag store``: looking after a store folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend_rag.cli.options import JsonOption, StoreOption
from cacheblend_rag.cli.output import say_bytes, show_table, write_json
from cacheblend_rag.errors import ConfigError

__all__ = ["store_app"]

store_app = typer.Typer(
    help="Look after a store: figures, a check of every byte, emptying it.", no_args_is_help=True, rich_markup_mode=None
)


def _kv(store: Path) -> Path:
    """Return where the chunk KV of `store` lies: below it for one that `warm` filled, else `store` itself."""
    from cacheblend_rag.documents import kv_folder

    for folder in (kv_folder(store), store):
        if (folder / "store.json").is_file():
            return folder
    raise ConfigError(f"there is no store in {store}")


@store_app.command()
def stats(store: StoreOption = Path(".cacheblend"), json_file: JsonOption = None) -> None:
    """Show what the store holds."""
    from cacheblend_rag.documents import LibrarySettings
    from cacheblend_rag.store import open_store

    kv = _kv(store)
    opened = open_store(kv, ram_bytes=0)
    try:
        figures = opened.stats()
    finally:
        opened.close()
    settings = LibrarySettings.load(store)
    row: dict[str, Any] = {"store": str(kv), "model": settings.model if settings else None}
    row |= {"names": figures.nodes, "entries": figures.entries, "disk_bytes": figures.disk_bytes}
    lines = [
        ("model", row["model"]),
        ("named chunks", figures.nodes),
        ("chunks with KV", figures.entries),
        ("KV on disk", say_bytes(figures.disk_bytes)),
    ]
    show_table(str(kv), ("", ""), lines)
    write_json(json_file, "store stats", [row])


@store_app.command()
def check(
    store: StoreOption = Path(".cacheblend"),
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop what is damaged; it is computed again when it is needed.")
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Verify every file against the index and its checksums. Exit code 1 if something is wrong and was not repaired."""
    from cacheblend_rag.store.check import check_store

    kv = _kv(store)
    report = check_store(kv, repair=repair)
    for problem in report.problems:
        typer.echo(problem, err=True)
    verdict = "clean" if report.is_clean else "repaired" if report.repaired else "not clean"
    typer.echo(
        f"{kv} is {verdict}: {report.names} named chunks, {report.entries} with sound KV, {say_bytes(report.bytes)}"
    )
    row = {"store": str(kv), "clean": report.is_clean, "repaired": report.repaired, "names": report.names}
    row |= {"entries": report.entries, "disk_bytes": report.bytes, "problems": report.problems}
    write_json(json_file, "store check", [row])
    if not report.is_clean and not report.repaired:
        typer.echo("run it again with --repair", err=True)
        raise typer.Exit(1)


@store_app.command()
def clear(
    store: StoreOption = Path(".cacheblend"),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Remove everything that was warmed: the passages in Chroma, and all KV."""
    from cacheblend_rag.documents import clear_library, is_library
    from cacheblend_rag.store import open_store

    kv = _kv(store)
    opened = open_store(kv, ram_bytes=0)
    try:
        figures = opened.stats()
        if not yes and not typer.confirm(
            f"remove {figures.nodes} chunks and {say_bytes(figures.disk_bytes)} of KV from {store}?"
        ):
            typer.echo("nothing was removed")
            raise typer.Exit(1)
        if not is_library(store):
            opened.clear()
    finally:
        opened.close()
    if is_library(store):
        clear_library(store)
    typer.echo(f"{store} is empty")
    write_json(
        json_file,
        "store clear",
        [{"store": str(kv), "removed_names": figures.nodes, "removed_bytes": figures.disk_bytes}],
    )
