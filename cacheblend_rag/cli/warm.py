"""``cacheblend-rag warm``: files into the vector store, their KV computed on the way."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import EmbeddingOption, JsonOption, StoredModelOption, StoreOption
from cacheblend_rag.cli.output import (
    make_quiet,
    on_interrupt,
    parse_bytes,
    progress_bar,
    say_bytes,
    say_seconds,
    show_table,
    write_json,
)
from cacheblend_rag.documents.settings import LibrarySettings, is_library, kv_folder
from cacheblend_rag.documents.splitter import SUFFIXES, Passage, cut, read_files
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.extras import needs_extra
from cacheblend_rag.lexer import lexer_of

if TYPE_CHECKING:
    from cacheblend_rag.config import BlendConfig, EngineConfig
    from cacheblend_rag.documents.embedding import Embedding
    from cacheblend_rag.documents.library import Library
    from cacheblend_rag.engine import BlendEngine

__all__ = ["CHUNK_TOKENS", "needs_documents", "texts_of", "warm", "warmed"]

CHUNK_TOKENS = 256
"""Maximum tokens of a passage, unless the store or an option says otherwise."""
# Passages that an estimate embeds.
_EMBEDDED = 16


def warm(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", exists=True, help="Files, and folders: text, Markdown, PDF, DOCX and HTML."),
    ],
    store: StoreOption = Path(".cacheblend"),
    model: StoredModelOption = None,
    embedding: EmbeddingOption = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Maximum tokens of a passage; by default the store's, or {CHUNK_TOKENS}.")
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Print the bytes and the time this would take, and stop.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Stop before the store holds more KV than this, such as 2GB or 500MiB."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Put files into the vector store and compute their KV, so that questions about them start quickly.

    Unchanged files are not encoded again; changed files are replaced, and removed files deleted. If a run is stopped, in
    whatever way, the next run finishes it.
    """
    budget_bytes = None if budget is None else parse_bytes(budget)
    known = LibrarySettings.load(store)
    texts, left_out = texts_of(paths, may_be_none=known is not None)
    name = model or (known.model if known else None)
    if name is None:
        raise typer.BadParameter(f"there is no store in {store} yet, so name a model: --model NAME")
    from cacheblend_rag.documents.embedding import Embedding
    from cacheblend_rag.documents.library import open_library, passage_config

    finder = Embedding(embedding or (known.embedding if known else None))
    settings = LibrarySettings(name, finder.name, chunk_tokens or (known.chunk_tokens if known else CHUNK_TOKENS))
    if not estimate:
        # First, so that what cannot be had leaves no half-made store.
        needs_documents()
        if known is None:
            make_quiet()
            _ = finder.model
    # Asking what it would take must leave nothing, so a store that is not there is not made for it.
    folder = kv_folder(store) if kv_folder(store).is_dir() or not estimate else None
    with open_engine(settings.model, store=folder, config=passage_config()) as engine:
        if engine.store.path is None and not estimate:
            raise StoreError(f"the store in {folder} cannot be written, so KV would be lost; the log says why")
        passages = cut(texts, lexer_of(engine.tokenizer).count, settings.chunk_tokens)
        if engine.unsupported_reason is not None:
            typer.echo(f"no KV is computed: {engine.unsupported_reason}", err=True)
        if estimate:
            _estimate(engine, passages, finder, store, settings.model, budget_bytes, json_file)
            return
        settings.save(store)
        started = time.perf_counter()
        reached = 0

        def kept() -> str:
            return f"the KV of {reached} of {len(passages)} passages is in {store}; run the same command to continue"

        with on_interrupt(kept), open_library(store, engine, finder) as library, progress_bar("warming") as progress:

            def advance(done: int, total: int) -> None:
                nonlocal reached
                reached = max(reached, min(done, total))
                progress(done, total)

            read = [path for path in paths if path not in left_out]
            result = library.warm(passages, read, budget_bytes=budget_bytes, progress=advance)
        seconds = time.perf_counter() - started
    if not passages and not result.removed:
        raise _no_text(paths)
    files = len({passage.source for passage in passages})
    typer.echo(
        f"{len(passages)} passage{'' if len(passages) == 1 else 's'} of {files} file{'' if files == 1 else 's'}: "
        f"{result.encoded} encoded, {result.unchanged} unchanged, "
        f"{result.removed} removed; {say_bytes(result.kv_bytes)} of KV in {store}; {say_seconds(seconds)}"
    )
    row = {"files": files, "passages": len(passages), "seconds": seconds, **asdict(result)}
    row |= {"budget_bytes": budget_bytes, "complete": result.left_out == 0}
    write_json(json_file, "warm", [row], **asdict(settings))
    if result.left_out:
        typer.echo(
            f"stopped: the budget of {say_bytes(budget_bytes or 0)} has no room for the remaining {result.left_out} passages; "
            "give a larger --budget and warm again",
            err=True,
        )
    if result.left_out or left_out.keys() & set(paths):
        raise typer.Exit(1)


def needs_documents() -> None:
    """See that what finds and keeps passages is installed, before a model is loaded."""
    with needs_extra("documents", "a library of documents"):
        import chromadb  # noqa: F401
        import sentence_transformers  # noqa: F401


def texts_of(paths: Sequence[Path], *, may_be_none: bool = False) -> tuple[dict[str, str], dict[Path, str]]:
    """Read files; return their texts, and which were left out and why. `ConfigError` where there is no text."""
    texts, left_out = read_files(paths)
    for file, reason in left_out.items():
        typer.echo(f"{file} is left out: {reason}", err=True)
    if not any(map(str.strip, texts.values())) and not may_be_none:
        raise _no_text(paths)
    return texts, left_out


def _no_text(paths: Sequence[Path]) -> ConfigError:
    return ConfigError(f"no text found in {', '.join(map(str, paths))}; of folders, {', '.join(SUFFIXES)} are read")


@contextmanager
def warmed(
    store: Path,
    model: str | None,
    embedding: str | None,
    config: EngineConfig | None = None,
    blend: BlendConfig | None = None,
    **changes: Any,
) -> Iterator[tuple[BlendEngine, Library, str]]:
    """Open what was warmed into a store: yields the engine, the library and the name of the model.

    Models that are not named are those that it was warmed with; `changes` are settings of `blend`, as `open_engine` takes them.
    """
    known = LibrarySettings.load(store)
    if known is None or not is_library(store):
        raise ConfigError(f"nothing was warmed into {store}; run: cacheblend-rag warm PATH --store {store}")
    from cacheblend_rag.documents.embedding import Embedding
    from cacheblend_rag.documents.library import open_library, passage_config

    needs_documents()
    name = model or known.model
    with (
        open_engine(name, store=kv_folder(store), config=passage_config(config), blend=blend, **changes) as engine,
        open_library(store, engine, Embedding(embedding or known.embedding)) as library,
    ):
        if not len(library):
            raise ConfigError(f"{store} holds no passages; run: cacheblend-rag warm PATH --store {store}")
        yield engine, library, name


def _estimate(
    engine: BlendEngine,
    passages: list[Passage],
    finder: Embedding,
    store: Path,
    model: str,
    budget_bytes: int | None,
    json_file: Path | None,
) -> None:
    cost = engine.estimate([passage.chunk for passage in passages])
    sample = [passage.text for passage in passages[:: max(1, len(passages) // _EMBEDDED)]]
    embedding_s: float | None = None
    with suppress(ConfigError):  # what embeds is not installed
        # The first call loads the model.
        finder.embed(sample[:1])
        started = time.perf_counter()
        finder.embed(sample)
        embedding_s = (time.perf_counter() - started) / max(1, len(sample)) * cost.chunks
    held_bytes = engine.store.stats().disk_bytes
    there = next(folder for folder in [store.absolute(), *store.absolute().parents] if folder.exists())
    free_bytes = shutil.disk_usage(there).free
    lines = [
        ("passages", len(passages)),
        ("to encode", cost.chunks),
        ("tokens", cost.tokens),
        ("KV on disk", say_bytes(cost.disk_bytes)),
        ("KV in RAM at most", say_bytes(cost.ram_bytes)),
        ("KV per token", say_bytes(cost.disk_bytes / cost.tokens) if cost.tokens else None),
        ("time for the KV", say_seconds(cost.seconds)),
        ("time for embedding", None if embedding_s is None else say_seconds(embedding_s)),
        ("KV held already", say_bytes(held_bytes)),
        ("free on disk", say_bytes(free_bytes)),
    ]
    show_table(f"warming {store} for {model} would take", ("", ""), lines)
    limit_bytes = engine.config.disk_bytes
    if limit_bytes is None:
        limit_bytes = (free_bytes + held_bytes) // 2
    if held_bytes + cost.disk_bytes > limit_bytes:
        typer.echo(f"the store keeps at most {say_bytes(limit_bytes)} on this disk (disk_bytes)", err=True)
    if budget_bytes is not None and held_bytes + cost.disk_bytes > budget_bytes:
        typer.echo(f"this exceeds the budget of {say_bytes(budget_bytes)}; warming would stop before it does", err=True)
    row = {
        "passages": len(passages),
        "to_encode": cost.chunks,
        "tokens": cost.tokens,
        "kv_bytes": cost.disk_bytes,
        "ram_bytes": cost.ram_bytes,
        "bytes_per_token": cost.disk_bytes // cost.tokens if cost.tokens else None,
        "seconds": cost.seconds,
        "embedding_seconds": embedding_s,
        "held_bytes": held_bytes,
        "free_bytes": free_bytes,
        "budget_bytes": budget_bytes,
    }
    write_json(json_file, "warm --estimate", [row], model=model)
