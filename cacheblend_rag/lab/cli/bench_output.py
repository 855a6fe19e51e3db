"""What the ``cacheblend-rag bench`` commands show and write: how far they are, ranges, and rows of the JSON file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.cli.output import console, say_seconds, write_json
from cacheblend_rag.lab.cli.options import plain_values

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from cacheblend_rag.lab.bench import ModelSetting

__all__ = ["measuring", "say_cached", "say_range", "write_bench"]


@contextmanager
def measuring(preparing: str) -> Iterator[Callable[[int, int], None]]:
    """Show what is prepared, then how far the measurement is; yields what is called with the runs done and all of them."""
    with console(stderr=True).status(preparing) as status:
        yield lambda done, total: status.update(f"measuring, {done} of {total}")


def say_range(least_s: float, most_s: float) -> str:
    """Return the times between which all rounds were: ``"12 ms to 15 ms"``."""
    return f"{say_seconds(least_s)} to {say_seconds(most_s)}"


def say_cached(share: float | None) -> None:
    """Warn if part of the files stayed in the page cache when it was emptied."""
    if share:
        console().print(
            f"{share:.0%} of the files stayed in the page cache when it was emptied: these are not times of the disk",
            style="yellow",
        )


def write_bench(
    path: Path | None,
    command: str,
    setting: ModelSetting,
    rows: Sequence[DataclassInstance],
    each: Mapping[str, Any] | None = None,
    **facts: Any,
) -> None:
    """Write what was measured on a model of random weights, if a file was asked for.

    Parameters
    ----------
    path : Path or None
        The file.
    command : str
        The command's name.
    setting : ModelSetting
        What was measured.
    rows : sequence of dataclass
        The figures.
    each : mapping, optional
        What stands in every row besides the shape, the device and the dtype.
    **facts : Any
        What else is to be known beside the setting.
    """
    shared = {"shape": setting.shape, "device": setting.device, "dtype": setting.dtype, **(each or {})}
    write_json(
        path,
        command,
        [asdict(row) | shared for row in rows],
        model=f"random weights, {setting.shape}",
        setting=plain_values(asdict(setting)) | facts,
    )
