"""Output of ``cacheblend-rag eval``: tables on the screen and in Markdown, rows of the JSON file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_rag.cli.output import say_seconds, show_table
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from cacheblend_lab.eval import EvalResult, EvalRow, Interval

__all__ = ["draw_result", "show_result", "write_markdown"]

_ALL = "all"
_AMOUNT = re.compile(r"@?[0-9.]+")


def show_result(result: EvalResult, title: str) -> None:
    """Print the figures over all questions, and every metric by kind where there are several kinds or metrics."""
    rows = [row for row in result.rows if row.kind == _ALL]
    # A terminal is not as wide as a file: of several metrics, the first stands beside the other figures.
    shown = result.metrics[:1]
    show_table(title, *_overview(shown, rows, named=False))
    kinds = list(dict.fromkeys(row.kind for row in result.rows))
    if len(kinds) > 1 or len(result.metrics) > 1:
        for metric in result.metrics:
            show_table(f"{metric} by kind of question", ("method", *kinds), _by_kind(result, metric, kinds))


def write_markdown(path: Path | None, result: EvalResult, title: str, facts: Sequence[str]) -> None:
    """Write the tables as Markdown, if a file was asked for; `facts` are sentences below the heading."""
    if path is None:
        return
    rows = [row for row in result.rows if row.kind == _ALL]
    parts = [
        f"# {title}",
        " ".join(facts),
        _table(*_overview(result.metrics, rows)),
    ]
    kinds = list(dict.fromkeys(row.kind for row in result.rows))
    if len(kinds) > 1:
        for metric in result.metrics:
            parts += [f"## {metric} by kind of question", _table(("method", *kinds), _by_kind(result, metric, kinds))]
    try:
        path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--markdown {path} cannot be written: {error.strerror}") from error


def draw_result(folder: Path, result: EvalResult, title: str) -> list[Path]:
    """Draw quality against time to first token (CacheBlend, Figures 12, 13 and 16), and for `needle` a heat map."""
    from cacheblend_lab.eval.plots import Quality, draw_needle_heat_map, draw_quality_against_ttft
    from cacheblend_lab.figures import save_figure

    metric = result.metrics[0]
    lines: dict[str, list[Quality]] = {}
    cells: dict[str, dict[str, float]] = {}
    for row in result.rows:
        if not row.metrics:
            continue
        found = row.metrics[metric]
        if row.kind != _ALL:
            cells.setdefault(row.method, {})[row.kind] = found.mean
            continue
        # The ratios of one selector are one line.
        amounts = [word for word in row.method.split() if _AMOUNT.fullmatch(word)]
        label = " ".join(word for word in row.method.split() if word not in amounts)
        point = Quality(found.mean, found.low, found.high, row.ttft_s, " ".join(amounts))
        lines.setdefault(label, []).append(point)
    for points in lines.values():
        points.sort(key=lambda point: point.ttft_s or 0.0)
    figure = draw_quality_against_ttft({title: lines}, metric)
    files = [save_figure(figure, folder / "quality-against-ttft.png")]
    if any(" @ " in kind for kinds in cells.values() for kind in kinds):
        files.append(save_figure(draw_needle_heat_map(cells), folder / "needle.png"))
    return files


def _overview(
    metrics: Sequence[str], rows: Sequence[EvalRow], *, named: bool = True
) -> tuple[tuple[str, ...], list[list[str | None]]]:
    """Return columns and lines of the figures over all questions."""
    names = ["method", "n"]
    for metric in metrics:
        names += [metric, f"{metric} - full"]
    losses = any(row.loss for row in rows)
    if losses:
        names += ["loss", "gap recovered", "first token's", "same first token"]
    columns = (*names, "- best other", "charged", "ratio", "same as full", "first token", "speedup", "output tokens")
    return columns, [_cells(metrics, row, named, losses) for row in rows]


def _cells(metrics: Sequence[str], row: EvalRow, named: bool, losses: bool) -> list[str | None]:
    cells: list[str | None] = [row.method, str(row.questions)]
    for metric in metrics:
        cells += [_interval(row.metrics.get(metric)), _interval(row.minus_full.get(metric), signed=True)]
    if losses:
        cells += [_interval(each) for each in (row.loss, row.recovered, row.first_recovered)]
        cells.append(_number(row.same_first))
    if not row.metrics:
        return [*cells, *["n/a"] * 7]
    best = None if row.minus_best is None else _interval(row.minus_best, signed=True)
    if best is not None and named:
        best = f"{best} {row.best}"
    return [
        *cells,
        best,
        _number(row.charged_ratio),
        _number(row.recompute_ratio),
        _number(row.same_as_full),
        None if row.ttft_s is None else say_seconds(row.ttft_s),
        None if row.speedup is None else f"{row.speedup:.2f}x",
        None if row.output_tokens is None else f"{row.output_tokens:.1f}",
    ]


def _by_kind(result: EvalResult, metric: str, kinds: Sequence[str]) -> list[list[str | None]]:
    found = {(row.method, row.kind): row for row in result.rows}
    methods = dict.fromkeys(row.method for row in result.rows)
    lines = []
    for method in methods:
        rows = [found.get((method, kind)) for kind in kinds]
        lines.append([method, *(None if row is None else _interval(row.metrics.get(metric)) for row in rows)])
    return lines


def _interval(interval: Interval | None, *, signed: bool = False) -> str:
    if interval is None:
        return "n/a"
    sign = "+" if signed else ""
    return f"{interval.mean:{sign}.3f} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _table(columns: Sequence[str], lines: Sequence[Sequence[str | None]]) -> str:
    def line(cells: Sequence[str | None]) -> str:
        return "| " + " | ".join("-" if cell is None else cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(columns), "|" + "---|" * len(columns), *(line(cells) for cells in lines)])
