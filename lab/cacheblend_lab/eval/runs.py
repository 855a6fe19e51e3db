"""Figures that take several runs: what ``cacheblend-rag eval`` and ``bench ttft`` wrote as JSON, put side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cacheblend_lab.eval.plots import Quality
from cacheblend_rag.errors import ConfigError

__all__ = ["Runs", "read_runs"]


@dataclass
class Runs:
    """Findings of several runs.

    Attributes
    ----------
    metric : str
        The metric of the evaluations.
    quality : dict of str to dict of int to Quality
        For each method that every evaluation has, its quality by the number of chunks.
    ttft_s : dict of str to dict of int to float
        For each method that every ``bench ttft`` has, seconds to the first token by prompt tokens.
    """

    metric: str = ""
    quality: dict[str, dict[int, Quality]] = field(default_factory=dict)
    ttft_s: dict[str, dict[int, float]] = field(default_factory=dict)


def read_runs(files: Sequence[Path], methods: Sequence[str] = ()) -> Runs:
    """Read the JSON files of ``eval`` and ``bench ttft``, of all methods or of those named, in this order.

    Methods of evaluations have their names, those of ``bench ttft`` are "full", "prefix_cache", "reuse" and "hkvd 0.15".
    """
    runs = Runs()
    quality: dict[int, dict[str, Quality]] = {}
    ttft_s: dict[int, dict[str, float]] = {}
    for file in files:
        whole = _read(file)
        try:
            if whole["command"] == "bench ttft":
                found = {_bench_label(row): float(row["ttft_s"]) for row in whole["rows"]}
                _put(ttft_s, int(whole["setting"]["prompt_tokens"]), found, file, "prompt tokens")
            else:
                runs.metric, points = _quality(whole)
                _put(quality, round(whole["chunks"]), points, file, "chunks")
        except (KeyError, TypeError, ValueError, StopIteration) as error:
            raise ConfigError(
                f"{file} is not what `cacheblend-rag eval TASK --json` or `bench ttft --json` of this version writes "
                f"({type(error).__name__}: {error})"
            ) from None
    runs.quality = _by_method(quality, methods)
    runs.ttft_s = _by_method(ttft_s, methods)
    if not runs.quality and not runs.ttft_s:
        raise ConfigError(
            f"the {len(files)} files have no method in common{' among ' + ', '.join(methods) if methods else ''}; "
            "nothing can be drawn"
        )
    return runs


def _read(file: Path) -> dict[str, Any]:
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    return whole if isinstance(whole, dict) else {}


def _quality(whole: dict[str, Any]) -> tuple[str, dict[str, Quality]]:
    rows = [row for row in whole["rows"] if row["kind"] == "all" and row["metrics"]]
    metric = next(iter(rows[0]["metrics"])) if rows else ""
    return metric, {
        row["method"]: Quality(
            row["metrics"][metric]["mean"], row["metrics"][metric]["low"], row["metrics"][metric]["high"], row["ttft_s"]
        )
        for row in rows
    }


def _bench_label(row: dict[str, Any]) -> str:
    label = f"{row['selector']} {row['recompute_ratio']:g}" if row["method"] == "blend" else str(row["method"])
    tier = row.get("tier")
    if tier not in (None, "ram") or row.get("pipeline") is False:
        label += f", {tier}" + (", no pipeline" if row.get("pipeline") is False else "")
    return label


def _put(into: dict[int, dict[str, Any]], place: int, found: dict[str, Any], file: Path, unit: str) -> None:
    if place in into:
        raise ConfigError(f"{file} is the second run with {place} {unit}; give one of each")
    into[place] = found


def _by_method(runs: dict[int, dict[str, Any]], methods: Sequence[str]) -> dict[str, dict[int, Any]]:
    common = [
        name
        for name in dict.fromkeys(name for found in runs.values() for name in found)
        if all(name in found for found in runs.values())
    ]
    chosen = [name for name in methods if name in common] if methods else common
    return {name: {place: runs[place][name] for place in sorted(runs)} for name in chosen}
