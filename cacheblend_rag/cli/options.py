"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AnswerTokensOption",
    "ChunkTokensOption",
    "ChunksOption",
    "CompareOption",
    "CutTokensOption",
    "DeviceOption",
    "DrawnSeedOption",
    "EmbeddingOption",
    "FinderOption",
    "FolderOption",
    "JsonOption",
    "MarkdownOption",
    "ModelOption",
    "QuestionTokensOption",
    "RepeatsOption",
    "SeedOption",
    "ShapeOption",
    "StoreOption",
    "StoredModelOption",
    "StreamOption",
    "TopKOption",
    "WeightsOption",
    "weights_dtype",
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
AnswerTokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens of the answer.")]
CompareOption = Annotated[bool, typer.Option("--compare", help="Answer by full prefill too, and show both times.")]
StreamOption = Annotated[
    bool | None,
    typer.Option("--stream/--no-stream", help="Show the answer as it is written; by default on a terminal."),
]
CutTokensOption = Annotated[
    int, typer.Option("--chunk-tokens", min=1, help="Most tokens of a chunk, where texts are cut or generated.")
]
TopKOption = Annotated[int, typer.Option("--top-k", min=1, help="How many chunks are retrieved, where texts are cut.")]
FinderOption = Annotated[
    str | None,
    typer.Option(
        "--embeddings",
        metavar="NAME",
        help="The sentence-transformers model, id or folder, that finds them; by default all-MiniLM-L6-v2.",
    ),
]
DrawnSeedOption = Annotated[int, typer.Option("--seed", help="What is drawn follows from it.")]
ShapeOption = Annotated[
    str,
    typer.Option(
        "--shape",
        metavar="NAME",
        help="The model's shape: tiny, smollm2-360m, qwen2-0.5b, gemma-3-1b, phi-3-mini-8-layers, llama-3.2-1b, qwen2.5-7b or "
        "llama-3.1-8b.",
    ),
]
ChunksOption = Annotated[int, typer.Option("--chunks", min=1, help="Chunks in the prompt.")]
ChunkTokensOption = Annotated[int, typer.Option("--chunk-tokens", min=1, help="Tokens of each chunk.")]
QuestionTokensOption = Annotated[int, typer.Option("--question-tokens", min=1, help="Tokens of the question.")]
RepeatsOption = Annotated[
    int, typer.Option("--repeats", min=1, help="Rounds; each runs every method once. The median counts.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")]
WeightsOption = Annotated[
    str | None,
    typer.Option("--dtype", help="float32, float16 or bfloat16; by default float32 on the CPU, else bfloat16."),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of weights and tokens.")]
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


def weights_dtype(dtype: str | None, device: str) -> str:
    """Return the dtype that `WeightsOption` means on a device."""
    return dtype or ("float32" if device.partition(":")[0] == "cpu" else "bfloat16")
