"""Figures carry the data that they are given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cacheblend_lab.eval import plots
from cacheblend_lab.eval.inside import TokenOverlap
from cacheblend_lab.eval.inside_figures import draw_overlap
from cacheblend_lab.eval.statistics import Spread
from cacheblend_lab.figures import save_figure
from cacheblend_rag.errors import ConfigError


def lines_of(axes: Any) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): [tuple(map(float, point)) for point in line.get_xydata()] for line in axes.lines}


def saved(figure: Any, folder: Path) -> Any:
    """The figure's first axes; the file must be one."""
    assert save_figure(figure, folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    return figure.axes[0]


def labels_of(axes: Any) -> set[str]:
    return {text.get_text() for text in axes.get_legend().get_texts()}


def test_quality_over_chunks(tmp_path: Path) -> None:
    full = {12: plots.Quality(0.6, 0.5, 0.7), 6: plots.Quality(0.4, 0.3, 0.5)}
    axes = saved(
        plots.draw_quality_over_chunks({"full": full, "reuse": {6: plots.Quality(0.3)}}, metric="recall"), tmp_path
    )
    assert lines_of(axes) == {"full": [(6, 0.4), (12, 0.6)], "reuse": [(6, 0.3)]}
    assert axes.get_ylabel() == "recall"
    (band,) = axes.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} >= {(6, 0.3), (6, 0.5), (12, 0.5), (12, 0.7)}


@pytest.mark.parametrize("draw", [plots.draw_attention_deviation, plots.draw_ttft_over_length])
def test_lines_by_place(draw: Callable[..., Any], tmp_path: Path) -> None:
    axes = saved(draw({"hkvd": {0.5: 1.0, 0.0: 3.0, 0.25: 1.5}, "random": {0.0: 3.0}}), tmp_path)
    assert lines_of(axes) == {"hkvd": [(0, 3), (0.25, 1.5), (0.5, 1)], "random": [(0, 3)]}
    assert labels_of(axes) == {"hkvd", "random"}
    assert axes.get_ylim()[0] == 0


@pytest.mark.parametrize(
    ("draw", "values"),
    [
        (plots.draw_rank_correlation, {1: -0.25, 0: 0.5, 2: 1.0}),
        (plots.draw_rank_correlation, {0: 0.5, 1: Spread(-0.25, -0.5, 0.0), 2: 1.0}),
        (plots.draw_attention_loss, np.array([0.5, -0.25, 1.0])),
    ],
)
def test_lines_by_layer(draw: Callable[..., Any], values: Any, tmp_path: Path) -> None:
    axes = saved(draw({"model": values}), tmp_path)
    assert lines_of(axes) == {"model": [(0, 0.5), (1, -0.25), (2, 1.0)]}
    assert axes.get_ylim()[0] < -0.25


def test_the_distribution_of_kv_deviation(tmp_path: Path) -> None:
    axes = saved(plots.draw_kv_deviation({"layer 3": [4.0, 1.0, 2.0, 2.0]}), tmp_path)
    assert lines_of(axes) == {"layer 3": [(1, 0.25), (2, 0.5), (2, 0.75), (4, 1.0)]}


def test_quality_against_ttft(tmp_path: Path) -> None:
    blend = [plots.Quality(0.5, 0.4, 0.6, ttft_s=0.1, note="5 %"), plots.Quality(0.55, ttft_s=0.2)]
    methods = {"blend": blend, "full": [plots.Quality(0.6, ttft_s=1.0)]}
    figure = plots.draw_quality_against_ttft({"musique": methods, "samsum": {"full": methods["full"]}})
    left = saved(figure, tmp_path)
    assert lines_of(left) == {"blend": [(0.1, 0.5), (0.2, 0.55)], "full": [(1.0, 0.6)]}
    assert [text.get_text() for text in left.texts] == ["5 %"]
    assert left.collections[0].get_segments()[0].tolist() == [[0.1, 0.4], [0.1, 0.6]]
    right = figure.axes[1]
    assert (left.get_title(), right.get_title()) == ("musique", "samsum")
    assert right.lines[0].get_color() == left.lines[1].get_color(), "a method has one colour in all panels"
    with pytest.raises(ConfigError, match="no ttft_s"):
        plots.draw_quality_against_ttft({"musique": {"full": [plots.Quality(0.6)]}})


def test_the_overlap_of_attention_and_recomputed_tokens(tmp_path: Path) -> None:
    attention = np.array([[0.5, 0.0, 0.3, 0.2], [0.1, 0.0, 0.8, 0.1]])
    seen = TokenOverlap(attention, {"hkvd": np.array([1, 2]), "a3": np.array([0, 2]), "none": np.array([], int)}, top=2)
    assert seen.high_attention.tolist() == [0, 2]
    assert [seen.hit_rate(method) for method in seen.recomputed] == [0.5, 1.0, 0.0]
    figure = draw_overlap(seen)
    above = saved(figure, tmp_path)
    assert np.asarray(above.images[0].get_array()) == pytest.approx(np.sqrt(attention))
    _, below = figure.axes
    rows = np.asarray(below.images[0].get_array())
    assert rows.tolist() == [[1, 0, 1, 0], [0, 0.35, 1, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert [label.get_text() for label in below.get_yticklabels()][1] == "hkvd: 50% hit"
    with pytest.raises(ConfigError, match="top=5"):
        TokenOverlap(attention, {}, top=5)
    with pytest.raises(ConfigError, match="recomputes tokens 3 to 4"):
        TokenOverlap(attention, {"hkvd": np.array([3, 4])}, top=1)


def test_the_needle_heat_map(tmp_path: Path) -> None:
    kinds = {"all": 0.5, "2048 @ 0": 0.0, "1024 @ 0": 1.0, "1024 @ 0.5": 0.5}
    figure = plots.draw_needle_heat_map({"full": kinds, "reuse": {"1024 @ 0": 0.25}})
    axes = saved(figure, tmp_path)
    cells = np.asarray(axes.images[0].get_array().filled(-1))
    assert cells.tolist() == [[1.0, 0.0], [0.5, -1]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1024", "2048"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0 %", "50 %"]
    assert [each.get_title() for each in figure.axes[:2]] == ["full", "reuse"]
    with pytest.raises(ConfigError, match='evaluate the task "needle" first'):
        plots.draw_needle_heat_map({"full": {"all": 1.0}})


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        plots.draw_attention_loss({})
    with pytest.raises(ConfigError, match="nothing to draw for 'hkvd'"):
        plots.draw_kv_deviation({"hkvd": []})
    figure = plots.draw_attention_loss({"hkvd": [1.0]})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        save_figure(figure, tmp_path / "file" / "figure.png")
