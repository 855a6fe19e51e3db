"""The one runner of all benches: set-up, methods in alternating rounds, times, rows, and what is told of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from cacheblend_lab.bench.settings import BenchSetting, ModelSetting, RoundsSetting
from cacheblend_lab.bench.tiers import ColdFolder
from cacheblend_lab.cli.options import plain_values
from cacheblend_rag.cli.output import say_seconds

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "Bench",
    "RoundsBench",
    "Say",
    "in_rounds",
    "median_ratio",
    "percentiles",
    "say_nothing",
    "say_range",
    "seconds_of",
    "wait_for_device",
]

Say = Callable[[str], object]
"""Takes what is done now."""

SettingT = TypeVar("SettingT", bound=BenchSetting)
RoundsT = TypeVar("RoundsT", bound=RoundsSetting)
Row = TypeVar("Row", bound="DataclassInstance")
Method = TypeVar("Method")
Result = TypeVar("Result")
Own = TypeVar("Own", bound="Bench[Any, Any]")


def say_nothing(what: str) -> None:
    """Say nothing."""


class Bench(ABC, Generic[SettingT, Row]):
    """Measurement of one command, with its table and its JSON file; a context manager that closes what was opened for it.

    Attributes
    ----------
    closing : ExitStack
        Closes what was opened.
    disk : ColdFolder or None
        The folder of a store that is measured from disk.
    """

    text_columns: ClassVar[int] = 1
    """Number of the table's first columns that are text."""

    def __init__(self, setting: SettingT) -> None:
        self.setting = setting
        self.closing = ExitStack()
        self.disk: ColdFolder | None = None

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.close()

    @abstractmethod
    def measure(self, say: Say = say_nothing) -> list[Row]:
        """Return the figures, saying meanwhile what is measured."""

    @abstractmethod
    def title(self, rows: Sequence[Row]) -> str:
        """Return what stands above the table."""

    @abstractmethod
    def cells(self, row: Row) -> dict[str, Any]:
        """Return a row's line of the table, by the names of the columns."""

    def table(self, rows: Sequence[Row]) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """Return the columns and the lines of the table."""
        lines = [self.cells(row) for row in rows]
        return list(lines[0]), [list(line.values()) for line in lines]

    def facts(self) -> dict[str, Any]:
        """Return what the JSON file says beside the settings."""
        return {}

    def shared(self) -> dict[str, Any]:
        """Return what the JSON file says in every row."""
        setting = self.setting
        if not isinstance(setting, ModelSetting):
            return {}
        return {"shape": setting.shape, "device": setting.device, "dtype": setting.dtype}

    def about(self) -> dict[str, Any]:
        """Return what the JSON file says beside the settings and the rows."""
        setting = self.setting
        return {"model": f"random weights, {setting.shape}"} if isinstance(setting, ModelSetting) else {}

    def figures(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return what the JSON file of this bench holds, its rows included."""
        return {
            **self.about(),
            "setting": plain_values(asdict(self.setting)) | self.facts(),
            "rows": [asdict(row) | self.shared() for row in rows],
        }

    def use_disk(self, parent: Path | None) -> ColdFolder:
        """Make the folder of a store that is measured from disk, for the time of the measurement."""
        self.disk = ColdFolder(parent)
        self.closing.callback(self.disk.remove)
        return self.disk

    def cached_share_after_drop(self) -> float | None:
        """Return which share of the disk tier's files is in memory once they were dropped; None without such files."""
        return None if self.disk is None else self.disk.cached_share_after_drop()


class RoundsBench(Bench[RoundsT, Row], Generic[RoundsT, Method, Result, Row]):
    """Runs methods in rounds and makes a row of each one's runs, beside those of the method that it is compared with."""

    def measure(self, say: Say = say_nothing) -> list[Row]:
        """Run every method once unmeasured, then in as many rounds as the setting says, each beginning with another method."""
        methods = self.methods()
        runs = in_rounds(methods, self.run, self.setting.repeats, say=say)
        return [self.row(method, runs) for method in methods]

    @abstractmethod
    def methods(self) -> Sequence[Method]:
        """Return what is compared, in the order of the rows."""

    @abstractmethod
    def run(self, method: Method) -> Result:
        """Run a method once."""

    @abstractmethod
    def row(self, method: Method, runs: Mapping[Method, Sequence[Result]]) -> Row:
        """Return a method's figures."""


def in_rounds(
    methods: Sequence[Method],
    run: Callable[[Method], Result],
    rounds: int,
    *,
    unmeasured: int = 1,
    say: Say = say_nothing,
) -> dict[Method, list[Result]]:
    """Run methods in alternation, so that what disturbs the machine for a while disturbs all of them.

    Each round begins with another method, so that none always follows the same. Returned are, for each method, the results of the
    `rounds` that are measured, which follow `unmeasured` ones.
    """
    results: dict[Method, list[Result]] = {method: [] for method in methods}
    done = 0
    for number in range(rounds + unmeasured):
        first = number % len(methods)
        for method in [*methods[first:], *methods[:first]]:
            result = run(method)
            if number >= unmeasured:
                results[method].append(result)
            done += 1
            say(f"measuring, {done} of {len(methods) * (rounds + unmeasured)}")
    return results


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long something takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def wait_for_device(device: str) -> None:
    """Wait until a device has done all it was asked to; the CPU always has."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over the rounds of one method's time over another's in the same round.

    What disturbs the machine for a round disturbs both, so that this is steadier than the ratio of their medians.
    """
    return median(own / other for own, other in zip(times, others, strict=True))


def percentiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the 99th percentile and the greatest of at least one time."""
    ranked = sorted(times)
    return ranked[len(ranked) // 2], ranked[len(ranked) * 99 // 100], ranked[-1]


def say_range(least_s: float, most_s: float) -> str:
    """Return the times between which all rounds were: ``"12 ms to 15 ms"``."""
    return f"{say_seconds(least_s)} to {say_seconds(most_s)}"
