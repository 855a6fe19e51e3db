"""Figures of an evaluation, each from plain data: CacheBlend's 2, 6, 7, 8, 12, 13 and 16, A3's 3, 4 and 7,
Prompt Cache's 5.

Every function returns a matplotlib figure; `cacheblend_lab.figures.save_figure` writes it. All raise ConfigError
where there is nothing to draw or matplotlib is not installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cacheblend_lab.eval.statistics import Spread
from cacheblend_lab.figures import new_figure
from cacheblend_rag.errors import ConfigError

__all__ = [
    "Quality",
    "draw_attention_deviation",
    "draw_attention_loss",
    "draw_kv_deviation",
    "draw_needle_heat_map",
    "draw_quality_against_ttft",
    "draw_quality_over_chunks",
    "draw_rank_correlation",
    "draw_ttft_over_length",
]

_MARKERS = "osD^vP*Xph<>"


@dataclass(frozen=True, slots=True)
class Quality:
    """Quality of a method's answers, and, where it is drawn, how soon they begin.

    Attributes
    ----------
    quality : float
        The mean of a metric.
    low, high : float, optional
        Ends of its confidence interval.
    ttft_s : float, optional
        Median time to the first token.
    note : str
        What is written beside the point, such as its ratio.
    """

    quality: float
    low: float | None = None
    high: float | None = None
    ttft_s: float | None = None
    note: str = ""


def draw_quality_over_chunks(quality: Mapping[str, Mapping[int, Quality]], metric: str = "F1") -> Any:
    """Draw each method's quality over the number of chunks (CacheBlend, Figure 2)."""
    _check(quality)
    figure, [axes] = new_figure()
    for number, (method, points) in enumerate(quality.items()):
        counts = sorted(points)
        axes.plot(
            counts,
            [points[count].quality for count in counts],
            color=f"C{number}",
            marker=_MARKERS[number % len(_MARKERS)],
            label=method,
        )
        bounds = [(count, point.low, point.high) for count in counts if (point := points[count]).low is not None]
        if bounds:
            places, low, high = zip(*bounds, strict=True)
            axes.fill_between(places, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
    _finish(axes, xlabel="chunks", ylabel=metric)
    _whole_numbers(axes)
    return figure


def draw_attention_deviation(
    deviation: Mapping[str, Mapping[float, float | Spread]], xlabel: str = "recompute ratio"
) -> Any:
    """Draw how far attention of each selector or model is from full prefill, over the recompute ratio (CacheBlend, Figure 6)."""
    return _lines(deviation, xlabel=xlabel, ylabel="attention deviation")


def draw_kv_deviation(
    deviation: Mapping[str, Sequence[float] | NDArray[np.floating[Any]]], xlabel: str = "KV deviation"
) -> Any:
    """Draw the distribution of the tokens' KV deviation, or of its percentiles, by layer or model (CacheBlend, Figure 7)."""
    _check(deviation)
    figure, [axes] = new_figure()
    for label, values in deviation.items():
        ordered = np.sort(np.asarray(values, dtype=float))
        axes.step(ordered, np.arange(1, ordered.size + 1) / ordered.size, where="post", label=label)
    _finish(axes, xlabel=xlabel, ylabel="share of tokens, up to this")
    return figure


def draw_rank_correlation(correlation: Mapping[str, Mapping[int, float | Spread]]) -> Any:
    """Draw how alike each layer and the next rank the tokens by KV deviation, by Spearman's correlation (Figure 8)."""
    figure = _lines(correlation, xlabel="layer, and the next", ylabel="rank correlation of KV deviation")
    figure.axes[0].set_ylim(top=1)
    _whole_numbers(figure.axes[0])
    return figure


def draw_quality_against_ttft(panels: Mapping[str, Mapping[str, Sequence[Quality]]], metric: str = "F1") -> Any:
    """Draw quality against TTFT (CacheBlend, Figure 12; with MapReduce and MapRerank, 13; over ratios, 16).

    Each data set is a panel; the points of a method, which have their `ttft_s`, are joined.
    """
    _check(panels)
    for methods in panels.values():
        _check(methods)
    if any(point.ttft_s is None for methods in panels.values() for points in methods.values() for point in points):
        raise ConfigError("a point has no ttft_s; give every point its time to the first token")
    figure, axes_of = new_figure(len(panels), width=4.6)
    numbers = {
        name: number for number, name in enumerate(dict.fromkeys(name for each in panels.values() for name in each))
    }
    for axes, (name, methods) in zip(axes_of, panels.items(), strict=True):
        for method, points in methods.items():
            color, marker = f"C{numbers[method]}", _MARKERS[numbers[method] % len(_MARKERS)]
            times = [point.ttft_s for point in points]
            axes.plot(times, [point.quality for point in points], color=color, marker=marker, label=method)
            for point in points:
                if point.low is not None and point.high is not None:
                    axes.vlines(point.ttft_s, point.low, point.high, color=color, alpha=0.5)
                if point.note:
                    place = (point.ttft_s, point.quality)
                    axes.annotate(
                        point.note, place, textcoords="offset points", xytext=(5, 4), color=color, fontsize="small"
                    )
        _finish(axes, xlabel="TTFT (s)", ylabel=metric, title=name)
        axes.set_xlim(left=0)
    return figure


def draw_attention_loss(loss: Mapping[str, Sequence[float] | NDArray[np.floating[Any]]]) -> Any:
    """Draw the L2 distance of attention from that of full prefill, layer by layer (A3, Figure 3)."""
    layers = {method: dict(enumerate(values)) for method, values in loss.items()}
    figure = _lines(layers, xlabel="layer", ylabel="attention loss (L2)")
    _whole_numbers(figure.axes[0])
    return figure


def draw_ttft_over_length(ttft_s: Mapping[str, Mapping[int, float]]) -> Any:
    """Draw TTFT over the length of the prompt (Prompt Cache, Figure 5)."""
    figure = _lines(ttft_s, xlabel="prompt tokens", ylabel="TTFT (s)")
    figure.axes[0].set_xlim(left=0)
    return figure


def draw_needle_heat_map(recall: Mapping[str, Mapping[str, float]]) -> Any:
    """Draw what was found at each depth and length, one map for each method.

    Parameters
    ----------
    recall : mapping of str to mapping of str to float
        For each method, the mean recall of each kind of `needle_task`'s questions; other kinds, such as "all", are left out. A
        cell without a figure stays blank.

    Raises
    ------
    ConfigError
        If there is nothing to draw, or matplotlib is not installed.
    """
    maps = {method: cells for method, kinds in recall.items() if (cells := _cells(kinds))}
    if not maps:
        raise ConfigError('there is no kind of the form "LENGTH @ DEPTH" to draw; evaluate the task "needle" first')
    lengths = sorted({length for cells in maps.values() for length, _ in cells})
    depths = sorted({depth for cells in maps.values() for _, depth in cells})
    figure, panels = new_figure(len(maps), width=1.8 + 0.6 * len(lengths), height=1.8 + 0.35 * len(depths))
    for axes, (method, cells) in zip(panels, maps.items(), strict=True):
        rows = [[cells.get((length, depth), float("nan")) for length in lengths] for depth in depths]
        image = axes.imshow(rows, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], rotation=45)
        axes.set_yticks(range(len(depths)), [f"{100 * depth:g} %" for depth in depths])
        axes.set(title=method, xlabel="tokens", ylabel="depth")
    figure.colorbar(image, ax=panels, label="recall")
    return figure


def _cells(kinds: Mapping[str, float]) -> dict[tuple[int, float], float]:
    cells = {}
    for kind, value in kinds.items():
        length, at, depth = kind.partition(" @ ")
        if at:
            cells[int(length), float(depth)] = value
    return cells


def _lines(lines: Mapping[str, Mapping[Any, float | Spread]], *, xlabel: str, ylabel: str) -> Any:
    _check(lines)
    figure, [axes] = new_figure()
    for number, (label, points) in enumerate(lines.items()):
        places = sorted(points)
        marker = _MARKERS[number % len(_MARKERS)]
        middle = [_middle(points[place]) for place in places]
        axes.plot(places, middle, color=f"C{number}", marker=marker, markersize=4, label=label)
        spreads = [(place, point.low, point.high) for place in places if isinstance(point := points[place], Spread)]
        if spreads:
            axes.fill_between(*zip(*spreads, strict=True), color=f"C{number}", alpha=0.15, linewidth=0)
    _finish(axes, xlabel=xlabel, ylabel=ylabel)
    # What is drawn here has no negative values but correlations, which keep their own lower end.
    if all(_middle(value) >= 0 for points in lines.values() for value in points.values()):
        axes.set_ylim(bottom=0)
    return figure


def _middle(value: float | Spread) -> float:
    return value.median if isinstance(value, Spread) else float(value)


def _finish(axes: Any, **labels: str) -> None:
    axes.set(**labels)
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.legend(fontsize="small")


def _whole_numbers(axes: Any) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)


def _check(lines: Mapping[str, Any]) -> None:
    if not lines:
        raise ConfigError("there is nothing to draw; give figures of at least one method")
    for label, points in lines.items():
        if len(points) == 0:
            raise ConfigError(f"there is nothing to draw for {label!r}; give at least one figure, or leave it out")
