"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "EmbeddingOption",
    "FolderOption",
    "JsonOption",
    "MarkdownOption",
    "ModelOption",
    "ShapeOption",
    "StoreOption",
    "StoredModelOption",
]


def _writable(path: Path | None) -> Path | None:
    # Found out before a command works for minutes, not after.
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder {path.absolute().parent} does not exist")
    return path


JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        dir_okay=False,
        writable=True,
        callback=_writable,
        help="Write the figures to FILE as JSON too.",
    ),
]
MarkdownOption = Annotated[
    Path | None,
    typer.Option(
        "--markdown",
        metavar="FILE",
        dir_okay=False,
        writable=True,
        callback=_writable,
        help="Write the tables to FILE as Markdown too.",
    ),
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model", metavar="NAME", help='A Hugging Face id, a folder, or "reference", the small model in this package.'
    ),
]
StoreOption = Annotated[
    Path,
    typer.Option(
        "--store",
        metavar="DIR",
        file_okay=False,
        help="The folder with the vector store (chroma) and the chunk KV (kv).",
    ),
]
EmbeddingOption = Annotated[
    str | None,
    typer.Option(
        "--embedding",
        metavar="NAME",
        help="A sentence-transformers model, id or folder; by default all-MiniLM-L6-v2.",
    ),
]
ShapeOption = Annotated[
    str,
    typer.Option(
        "--shape",
        metavar="NAME",
        help="The model's shape: tiny, smollm2-360m, qwen2-0.5b, gemma-3-1b, phi-3-mini-8-layers, llama-3.2-1b, qwen2.5-7b or "
        "llama-3.1-8b.",
    ),
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="DIR",
        exists=True,
        file_okay=False,
        help="Where the measured files are written for the time of the measurement; by default with other temporary files.",
    ),
]
StoredModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help='Hugging Face id, folder or "reference"; by default the store\'s, or "reference".',
    ),
]
