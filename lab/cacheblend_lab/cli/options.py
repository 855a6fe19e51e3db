"""Options that several of the lab's commands share, and what their values mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend_rag.errors import ConfigError

__all__ = [
    "CutTokensOption",
    "DrawnSeedOption",
    "FinderOption",
    "TopKOption",
    "command_of",
    "parse_capacities",
    "parse_counts",
    "parse_names",
    "plain_values",
]

CutTokensOption = Annotated[
    int, typer.Option("--chunk-tokens", min=1, help="Maximum tokens of a chunk, where texts are cut or generated.")
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
DrawnSeedOption = Annotated[int, typer.Option("--seed", help="Random seed.")]


def command_of(parameters: Sequence[Parameter], run: Callable[..., None], help: str | None) -> Callable[..., None]:
    """Return a command whose options are parameters that were put together; `run` takes their values by name."""

    def command(**values: Any) -> None:
        run(**values)

    command.__signature__ = Signature(  # type: ignore[attr-defined]
        [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters]
    )
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__doc__ = help
    return command


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list; one that is empty is among them, to be refused as any other unknown one."""
    return tuple(name.strip() for name in text.split(","))


def parse_counts(text: str, example: str = "10000,100000") -> tuple[int, ...]:
    """Return whole numbers written like the example."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        wrong = next(part.strip() for part in text.split(",") if not part.strip().isdecimal())
        raise ConfigError(f"{wrong!r} in {text!r} is not a whole number; write numbers like {example}") from None


def parse_capacities(text: str) -> tuple[int | float, ...]:
    """Return capacities written like ``"0.25,512"``: shares of the context, and whole numbers of tokens."""
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
