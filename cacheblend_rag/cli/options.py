"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "AnswerTokensOption",
    "CompareOption",
    "EmbeddingOption",
    "JsonOption",
    "LibraryOption",
    "ModelOption",
    "QuestionArgument",
    "RatioOption",
    "SelectorOption",
    "StoreOption",
    "StoredModelOption",
    "StreamOption",
    "TopKOption",
    "in_a_folder",
    "output_option",
]


def in_a_folder(path: Path | None) -> Path | None:
    """See that the folder of a file to write is there, before a command works for minutes: the callback of an option."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder {path.absolute().parent} does not exist")
    return path


def output_option(flag: str, help: str) -> Any:
    """Return an option that names a file to write."""
    return typer.Option(flag, metavar="FILE", dir_okay=False, writable=True, callback=in_a_folder, help=help)


def _asked(question: str) -> str:
    if not question.strip():
        raise typer.BadParameter("the question is empty")
    return question


JsonOption = Annotated[Path | None, output_option("--json", "Also write the figures to FILE as JSON.")]
QuestionArgument = Annotated[str, typer.Argument(callback=_asked, help="What to ask.")]
_MODEL = "A Hugging Face id, a folder or a GGUF file"
ModelOption = Annotated[str, typer.Option("--model", metavar="NAME", help=f"{_MODEL}.")]
StoredModelOption = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help=f"{_MODEL}; by default the library's.")
]
_LIBRARY = "The folder with the passages (chroma) and their KV (kv)."
LibraryOption = Annotated[Path, typer.Option("--library", metavar="DIR", file_okay=False, help=_LIBRARY)]
_STORE = "The folder with the KV, or a library that has it in kv."
StoreOption = Annotated[Path, typer.Option("--store", metavar="DIR", file_okay=False, help=_STORE)]
_EMBEDDING = "A sentence-transformers model, id or folder; by default all-MiniLM-L6-v2."
EmbeddingOption = Annotated[str | None, typer.Option("--embedding", metavar="NAME", help=_EMBEDDING)]
_SELECTOR = "Which tokens to recompute: hkvd, a3, boundary or random; by default from the settings."
SelectorOption = Annotated[str | None, typer.Option("--selector", metavar="NAME", help=_SELECTOR)]
AnswerTokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Maximum tokens of the answer.")]
CompareOption = Annotated[bool, typer.Option("--compare", help="Also answer by full prefill, and show both times.")]
_STREAM = "Show the answer as it is written; by default on a terminal."
_RATIO = "Share of the passages' tokens to recompute, 0 to 1."
RatioOption = Annotated[float | None, typer.Option("--ratio", help=_RATIO)]
TopKOption = Annotated[int, typer.Option("--top-k", min=1, help="How many passages to answer from.")]
StreamOption = Annotated[bool | None, typer.Option("--stream/--no-stream", help=_STREAM)]
