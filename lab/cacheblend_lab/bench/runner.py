"""The one runner of all benches: methods in alternating rounds, ratios taken round by round, a table and a file of figures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from cacheblend_rag.cli.output import say_bytes, say_seconds, show_table, write_json
from cacheblend_rag.errors import ConfigError

__all__ = [
    "Figures",
    "Say",
    "cell",
    "heading",
    "in_rounds",
    "median_ratio",
    "percentile",
    "rss_bytes",
    "seconds_of",
    "shown",
    "spread",
]

Say = Callable[[str], object]
"""Takes what is done now."""

Row = dict[str, Any]
Method = TypeVar("Method")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Figures:
    """What a bench measured: the title of its table, a row for each method, and what else its file says."""

    title: str
    rows: Sequence[Row]
    facts: Row = field(default_factory=dict)

    def show(self) -> None:
        """Print the table."""
        columns = shown(self.rows)
        lines = [[cell(name, row.get(name)) for name in columns] for row in self.rows]
        show_table(self.title, list(map(heading, columns)), lines)

    def write(self, path: Path | None, command: str, setting: Row) -> None:
        """Write the file, if one was asked for."""
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in setting.items()}
        write_json(path, command, self.rows, setting=plain, **self.facts)


def shown(rows: Sequence[Row]) -> list[str]:
    """Return the columns of a table: not the extremes of the rounds, which only the file has, nor what no row has."""
    names = [
        name for name in dict.fromkeys(name for row in rows for name in row) if not name.endswith(("_min_s", "_max_s"))
    ]
    return [name for name in names if any(row.get(name) is not None for row in rows)]


def heading(name: str) -> str:
    """Return what stands above a column."""
    return name if name.endswith("per_s") else name.removesuffix("_s")


def cell(name: str, value: Any) -> str | None:
    """Return a value as people read it, by the ending of its name."""
    if value is None or isinstance(value, str):
        return value
    if name.endswith("_bytes"):
        return say_bytes(value)
    if name.endswith("_s") and not name.endswith("per_s"):
        return say_seconds(value)
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def in_rounds(
    methods: Sequence[Method], run: Callable[[Method], Result], rounds: int, *, unmeasured: int = 1, say: Say
) -> dict[Method, list[Result]]:
    """Run methods in alternation, so that what disturbs the machine for a while disturbs all of them.

    Each round begins with another method, so that none always follows the same. Returned are, for each method, the results of the
    `rounds` that are measured, which follow `unmeasured` ones.
    """
    results: dict[Method, list[Result]] = {method: [] for method in methods}
    for number in range(rounds + unmeasured):
        say(f"measuring, round {number + 1} of {rounds + unmeasured}")
        first = number % len(methods)
        for method in [*methods[first:], *methods[:first]]:
            result = run(method)
            if number >= unmeasured:
                results[method].append(result)
    return results


def seconds_of(work: Callable[..., object], *given: Any) -> float:
    """Return how long something takes."""
    started = time.perf_counter()
    work(*given)
    return time.perf_counter() - started


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over the rounds of one method's time over another's in the same round.

    What disturbs the machine for a round disturbs both, so that this is steadier than the ratio of their medians.
    """
    return median(own / other for own, other in zip(times, others, strict=True))


def spread(name: str, times: Sequence[float]) -> Row:
    """Return the median and the extremes of times: ``{"ttft_s": ..., "ttft_min_s": ..., "ttft_max_s": ...}``."""
    return {f"{name}_s": median(times), f"{name}_min_s": min(times), f"{name}_max_s": max(times)}


def percentile(times: Sequence[float], share: int) -> float:
    """Return the time within which so many of a hundred were."""
    ranked = sorted(times)
    return ranked[min(len(ranked) * share // 100, len(ranked) - 1)]


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    memory = Path("/proc/self/statm")
    if not memory.exists():
        raise ConfigError(f"the memory that is taken is read from {memory}, which is not there; use Linux")
    return int(memory.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
