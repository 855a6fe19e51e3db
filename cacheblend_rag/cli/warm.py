"""``cacheblend-rag warm``: files into the vector store, their KV computed on the way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import EmbeddingOption, JsonOption, LibraryOption, StoredModelOption
from cacheblend_rag.cli.output import (
    make_quiet,
    on_interrupt,
    progress_bar,
    say_bytes,
    say_seconds,
    show_table,
    write_json,
)
from cacheblend_rag.documents.settings import LibrarySettings, kv_folder, make_folder
from cacheblend_rag.documents.splitter import SUFFIXES, cut, read_files
from cacheblend_rag.errors import ConfigError, StoreError, needs_extra
from cacheblend_rag.lexer import lexer_of

if TYPE_CHECKING:
    from cacheblend_rag.config import BlendConfig, EngineConfig
    from cacheblend_rag.documents.library import Library
    from cacheblend_rag.engine import BlendEngine

__all__ = ["CHUNK_TOKENS", "needs_documents", "texts_of", "warm", "warmed"]

CHUNK_TOKENS = 256
"""Maximum tokens of a passage, unless the library or an option says otherwise."""


def warm(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", exists=True, help="Files, and folders: text, Markdown, PDF, DOCX and HTML."),
    ],
    folder: LibraryOption = Path(".cacheblend"),
    model: StoredModelOption = None,
    embedding: EmbeddingOption = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Maximum tokens of a passage; by default the library's, or {CHUNK_TOKENS}."),
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Print the bytes of KV and the time that it would take, and stop.")
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Put files into the vector store and compute their KV, so that questions about them start quickly.

    Unchanged files are not encoded again; changed files are replaced, and removed files deleted. If a run is stopped, in
    whatever way, the next run finishes it.
    """
    known = LibrarySettings.load(folder)
    texts, left_out = texts_of(paths, may_be_none=known is not None)
    name = model or (known.model if known else None)
    if name is None:
        raise typer.BadParameter(f"there is no library in {folder} yet, so name a model: --model NAME")
    from cacheblend_rag.documents.embedding import Embedding
    from cacheblend_rag.documents.library import open_library, passage_config

    finder = Embedding(embedding or (known.embedding if known else None))
    settings = LibrarySettings(name, finder.name, chunk_tokens or (known.chunk_tokens if known else CHUNK_TOKENS))
    if not estimate:
        # First, so that what cannot be had leaves no half-made library.
        needs_documents()
        if known is None:
            make_quiet()
            _ = finder.model
    # Asking what it would take must leave nothing, so a library that is not there is not made for it.
    if not estimate:
        make_folder(folder)
    kv = kv_folder(folder) if kv_folder(folder).is_dir() or not estimate else None
    with open_engine(settings.model, store=kv, config=passage_config()) as engine:
        if engine.store.path is None and not estimate:
            raise StoreError(f"the store in {kv} cannot be written, so KV would be lost; the log says why")
        passages = cut(texts, lexer_of(engine.tokenizer).count, settings.chunk_tokens)
        if engine.unsupported_reason is not None:
            typer.echo(f"no KV is computed: {engine.unsupported_reason}", err=True)
        if estimate:
            cost = engine.estimate(passages)
            lines = [
                ("passages", len(passages)),
                ("to encode", cost.chunks),
                ("tokens", cost.tokens),
                ("KV on disk", say_bytes(cost.disk_bytes)),
                ("KV in RAM at most", say_bytes(cost.ram_bytes)),
                ("time for the KV", say_seconds(cost.seconds)),
            ]
            given = ", ".join(map(str, paths))
            show_table(f"warming {given} for {settings.model} would take", ("", ""), lines)
            row = {"passages": len(passages), **asdict(cost)}
            write_json(json_file, "warm --estimate", [row], model=settings.model)
            return
        replace(settings, finished=False).save(folder)
        started = time.perf_counter()
        reached = 0

        def kept() -> str:
            return f"the KV of {reached} of {len(passages)} passages is in {folder}; run the same command to continue"

        with on_interrupt(kept), open_library(folder, engine, finder) as library, progress_bar("warming") as progress:

            def advance(done: int, total: int) -> None:
                nonlocal reached
                reached = max(reached, min(done, total))
                progress(done, total)

            read = [path for path in paths if path not in left_out]
            result = library.warm(passages, read, progress=advance)
        settings.save(folder)
        seconds = time.perf_counter() - started
    if not passages and not result.removed:
        raise _no_text(paths)
    files = len({passage.document for passage in passages})
    typer.echo(
        f"{len(passages)} passage{'' if len(passages) == 1 else 's'} of {files} file{'' if files == 1 else 's'}: "
        f"{result.encoded} encoded, {result.unchanged} unchanged, "
        f"{result.removed} removed; {say_bytes(result.kv_bytes)} of KV in {folder}; {say_seconds(seconds)}"
    )
    row = {"files": files, "passages": len(passages), "seconds": seconds, **asdict(result)}
    write_json(json_file, "warm", [row], **asdict(settings))
    if left_out:
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
    folder: Path,
    model: str | None,
    embedding: str | None,
    config: EngineConfig | None = None,
    blend: BlendConfig | None = None,
    **changes: Any,
) -> Iterator[tuple[BlendEngine, Library, str]]:
    """Open what was warmed into a library: yields the engine, the library and the name of the model."""
    known = LibrarySettings.load(folder)
    if known is None or not kv_folder(folder).is_dir():
        raise ConfigError(f"nothing was warmed into {folder}; run: cacheblend-rag warm PATH --library {folder}")
    if not known.finished:
        typer.echo(f"not all documents are in {folder}: warming has not come to its end; run warm once more", err=True)
    from cacheblend_rag.documents.embedding import Embedding
    from cacheblend_rag.documents.library import open_library, passage_config

    needs_documents()
    name = model or known.model
    with (
        open_engine(name, store=kv_folder(folder), config=passage_config(config), blend=blend, **changes) as engine,
        open_library(folder, engine, Embedding(embedding or known.embedding)) as library,
    ):
        if not len(library):
            raise ConfigError(f"{folder} holds no passages; run: cacheblend-rag warm PATH --library {folder}")
        yield engine, library, name
