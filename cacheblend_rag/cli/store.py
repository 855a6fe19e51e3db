"""``cacheblend-rag store``: looking after a store folder."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption, StoreOption
from cacheblend_rag.cli.output import say_bytes, show_table, write_json
from cacheblend_rag.documents.settings import LibrarySettings, kv_folder
from cacheblend_rag.errors import ConfigError

__all__ = ["store_app"]

store_app = typer.Typer(
    help="Maintain a store: show figures, check every byte, clean up, empty it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_DEFAULT = Path(".cacheblend")


@store_app.command()
def stats(store: StoreOption = _DEFAULT, json_file: JsonOption = None) -> None:
    """Show what the store holds, in total and per tenant."""
    kv = _kv(store)
    from cacheblend_rag.config import EngineConfig
    from cacheblend_rag.store import open_store

    with closing(open_store(kv, ram_bytes=0, names=EngineConfig().names_url)) as opened:
        figures = opened.stats()
        tenants = opened.tenants()
        shares = {tenant: opened.stats(tenant) for tenant in tenants} if any(tenants) else {}
    settings = LibrarySettings.load(store)
    model = settings.model if settings else None
    lines = [
        ("model", model),
        ("chunk ids", figures.nodes),
        ("chunks with KV", figures.entries),
        ("KV on disk", say_bytes(figures.disk_bytes)),
    ]
    for tenant, share in shares.items():
        held = f"{share.nodes} ids, {share.entries} with KV, {say_bytes(share.disk_bytes)}"
        lines.append((f"tenant {tenant}" if tenant else "no tenant", held))
    show_table(str(kv), ("", ""), lines)
    whole, *parts = [
        {"names": each.nodes, "entries": each.entries, "disk_bytes": each.disk_bytes}
        for each in (figures, *shares.values())
    ]
    row = {"store": str(kv), "model": model, **whole, "tenants": dict(zip(shares, parts, strict=True))}
    write_json(json_file, "store stats", [row])


@store_app.command()
def check(
    store: StoreOption = _DEFAULT,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Drop what is damaged, which is computed again when it is needed, and files that killed processes left.",
        ),
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Verify every file against the index and its checksums. Exit code 1 if something is wrong and was not repaired."""
    kv = _kv(store)
    from cacheblend_rag.store import check_store

    report = check_store(kv, repair=repair)
    for problem in report.problems:
        typer.echo(problem, err=True)
    verdict = "clean" if report.is_clean else "repaired" if report.repaired else "not clean"
    typer.echo(
        f"{kv} is {verdict}: {report.names} chunk ids, {report.entries} with sound KV, {say_bytes(report.bytes)}"
    )
    row = {"store": str(kv), "clean": report.is_clean, "repaired": report.repaired, "names": report.names}
    row |= {"entries": report.entries, "disk_bytes": report.bytes, "problems": report.problems}
    if repair:
        typer.echo(f"removed {say_bytes(report.freed_bytes)}")
        row["freed_bytes"] = report.freed_bytes
    write_json(json_file, "store check", [row])
    if verdict == "not clean":
        typer.echo("to repair it, run this again with --repair", err=True)
        raise typer.Exit(1)


@store_app.command()
def clear(
    store: StoreOption = _DEFAULT,
    tenant: Annotated[str | None, typer.Option(help="Remove only the KV and ids of this tenant.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove all warmed passages from Chroma, and all KV. With --tenant, remove only the KV and ids of that tenant."""
    kv = _kv(store)
    from cacheblend_rag.documents.library import clear_library, open_to_clear

    what = "" if tenant is None else f" of tenant {tenant}"
    with closing(open_to_clear(kv)) as opened:
        figures = opened.stats(tenant)
        if not yes:
            size = say_bytes(figures.disk_bytes)
            typer.confirm(f"remove {figures.nodes} chunks and {size} of KV{what} from {store}?", abort=True)
        has_passages = tenant is None and (store / "chroma").is_dir()
        if not has_passages:
            opened.clear(tenant)
    if has_passages:
        clear_library(store)
    typer.echo(f"{store} is empty" if tenant is None else f"{store} no longer holds anything{what}")


def _kv(store: Path) -> Path:
    """Return the folder of KV in what ``warm`` made, or the folder itself where it is a store."""
    for folder in (kv_folder(store), store):
        if (folder / "store.json").is_file():
            return folder
    raise ConfigError(f"there is no store in {store}")
