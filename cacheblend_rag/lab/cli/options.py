"""Options that several of the lab's commands share, and what their values mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend_rag.errors import ConfigError

__all__ = [
    "ChunkTokensOption",
    "ChunksOption",
    "CutTokensOption",
    "DeviceOption",
    "DrawnSeedOption",
    "FinderOption",
    "FolderOption",
    "QuestionTokensOption",
    "RepeatsOption",
    "SeedOption",
    "ShapeOption",
    "TopKOption",
    "WeightsOption",
    "parse_capacities",
    "parse_counts",
    "plain_values",
    "weights_dtype",
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


def weights_dtype(dtype: str | None, device: str) -> str:
    """Return the dtype that `WeightsOption` means on a device."""
    return dtype or ("float32" if device.partition(":")[0] == "cpu" else "bfloat16")


def parse_counts(text: str, example: str = "10000,100000") -> tuple[int, ...]:
    """Return whole numbers written like the example.

    Raises
    ------
    ConfigError
        If one is not a whole number.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        wrong = next(part.strip() for part in text.split(",") if not part.strip().isdecimal())
        raise ConfigError(f"{wrong!r} in {text!r} is not a whole number; write numbers like {example}") from None


def parse_capacities(text: str) -> tuple[int | float, ...]:
    """Return capacities written like ``"0.25,512"``: shares of the context, and whole numbers of tokens.

    Raises
    ------
    ConfigError
        If one is not a number.
    """
    capacities: list[int | float] = []
    for part in text.split(","):
        try:
            capacities.append(int(part) if part.strip().isdecimal() else float(part))
        except ValueError:
            raise ConfigError(
                f"{part.strip()!r} in {text!r} is not a number; write shares of the context like 0.25, or tokens like 512"
            ) from None
    return tuple(capacities)


def plain_values(setting: dict[str, Any]) -> dict[str, Any]:
    """Return a setting's values as JSON has them."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in setting.items()}
