"""``cacheblend-rag warm``: files into the vector store, their KV computed on the way."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import EmbeddingOption, JsonOption, StoredModelOption, StoreOption
from cacheblend_rag.cli.output import (
    make_quiet,
    parse_bytes,
    progress_bar,
    say_bytes,
    say_seconds,
    show_table,
    write_json,
)

if TYPE_CHECKING:
    from cacheblend_rag.documents import Passage
    from cacheblend_rag.engine import BlendEngine

__all__ = ["CHUNK_TOKENS", "token_counter", "warm"]

CHUNK_TOKENS = 256
"""Most tokens of a passage, unless the store or an option says otherwise."""


def warm(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files, and folders of .txt, .md and .rst files.")
    ],
    store: StoreOption = Path(".cacheblend"),
    model: StoredModelOption = None,
    embedding: EmbeddingOption = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Most tokens of a passage; by default the store's, or {CHUNK_TOKENS}.")
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say what it would take, in bytes and time, and stop.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Stop before the store holds more KV than this, such as 2GB or 500MiB."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Put files into the vector store and compute their KV, so that questions about them start quickly.

    Files that have not changed since are not encoded again; what was changed or removed is replaced or deleted. A run that was
    stopped, in whatever way, is finished by the next one.
    """
    budget_bytes = None if budget is None else parse_bytes(budget)
    from cacheblend_rag.documents import Embedding, Library, LibrarySettings, kv_folder, passage_config, read_passages

    known = LibrarySettings.load(store)
    settings = LibrarySettings(
        model or (known.model if known else "reference"),
        Embedding(embedding or (known.embedding if known else None)).name,
        chunk_tokens or (known.chunk_tokens if known else CHUNK_TOKENS),
    )
    # Asking what it would take must leave nothing behind, so a store that is not there is not made for it.
    exists = kv_folder(store).is_dir()
    for path in paths:
        if not path.exists():
            raise typer.BadParameter(f"there is no file or folder {path}", param_hint="PATH")
    embedding_model = Embedding(settings.embedding)
    if not estimate and known is None:
        # First, so that a model which cannot be had leaves no half-made store behind.
        make_quiet()
        embedding_model.load()
    folder = kv_folder(store) if exists or not estimate else None
    with open_engine(settings.model, store=folder, config=passage_config()) as engine:
        passages, skipped = read_passages(paths, token_counter(engine), settings.chunk_tokens)
        for note in skipped:
            typer.echo(note, err=True)
        if not passages:
            typer.echo(
                f"no text was found in {', '.join(map(str, paths))}: .txt, .md and .rst files are read", err=True
            )
        if engine.unsupported_reason is not None:
            typer.echo(f"no KV is computed: {engine.unsupported_reason}", err=True)
        if estimate:
            _estimate(engine, passages, store, settings.model, budget_bytes, json_file)
            return
        settings.save(store)
        started = time.perf_counter()
        with Library(store, engine, embedding_model) as library, progress_bar("warming") as progress:
            result = library.warm(passages, paths, budget_bytes=budget_bytes, progress=progress)
        seconds = time.perf_counter() - started
    files = len({passage.source for passage in passages})
    typer.echo(
        f"{len(passages)} passages of {files} files: {result.encoded} encoded, {result.unchanged} unchanged, "
        f"{result.removed} removed; {say_bytes(result.kv_bytes)} of KV in {store}; {say_seconds(seconds)}"
    )
    row: dict[str, Any] = {"files": files, "passages": len(passages), "seconds": seconds}
    row |= {
        name: getattr(result, name) for name in ("encoded", "unchanged", "removed", "left_out", "tokens", "kv_bytes")
    }
    row |= {"budget_bytes": budget_bytes, "complete": result.left_out == 0}
    write_json(
        json_file, "warm", [row], model=settings.model, embedding=settings.embedding, chunk_tokens=settings.chunk_tokens
    )
    if result.left_out:
        typer.echo(
            f"stopped: the budget of {say_bytes(budget_bytes or 0)} has no room for the remaining {result.left_out} passages; "
            "give a larger --budget and warm again",
            err=True,
        )
        raise typer.Exit(1)


def token_counter(engine: BlendEngine) -> Callable[[str], int]:
    """Return what counts the tokens of a text."""
    tokenizer = engine.tokenizer
    # Long texts are meant to be counted here, so no warning that one exceeds the model's window.
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _estimate(
    engine: BlendEngine,
    passages: list[Passage],
    store: Path,
    model: str,
    budget_bytes: int | None,
    json_file: Path | None,
) -> None:
    from cacheblend_rag.documents import passage_chunk

    cost = engine.estimate([passage_chunk(passage) for passage in passages])
    held_bytes = engine.store.stats().disk_bytes
    existing = next(folder for folder in [store.absolute(), *store.absolute().parents] if folder.exists())
    free_bytes = shutil.disk_usage(existing).free
    row: dict[str, Any] = {
        "passages": len(passages),
        "to_encode": cost.chunks,
        "tokens": cost.tokens,
        "kv_bytes": cost.kv_bytes,
        "bytes_per_token": cost.kv_bytes // cost.tokens if cost.tokens else None,
        "seconds": cost.seconds,
        "held_bytes": held_bytes,
        "free_bytes": free_bytes,
        "budget_bytes": budget_bytes,
    }
    lines = [
        ("passages", len(passages)),
        ("to encode", cost.chunks),
        ("tokens", cost.tokens),
        ("KV", say_bytes(cost.kv_bytes)),
        ("KV a token", None if not cost.tokens else say_bytes(cost.kv_bytes / cost.tokens)),
        ("time for the KV", say_seconds(cost.seconds)),
        ("KV held already", say_bytes(held_bytes)),
        ("free on disk", say_bytes(free_bytes)),
    ]
    show_table(f"warming {store} for {model} would take", ("", ""), lines)
    if cost.kv_bytes > free_bytes:
        typer.echo("this does not fit on the disk", err=True)
    if budget_bytes is not None and held_bytes + cost.kv_bytes > budget_bytes:
        typer.echo(f"this exceeds the budget of {say_bytes(budget_bytes)}; warming would stop before it does", err=True)
    write_json(json_file, "warm --estimate", [row], model=model)
