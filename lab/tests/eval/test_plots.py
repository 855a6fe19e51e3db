"""Figures carry the data that they are given."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cacheblend_lab.eval import plots
from cacheblend_lab.eval.inside import TokenOverlap
from cacheblend_lab.eval.inside_figures import draw_overlap
from cacheblend_lab.figures import save_figure
from cacheblend_rag.errors import ConfigError


def lines_of(axes: Any) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): [tuple(map(float, point)) for point in line.get_xydata()] for line in axes.lines}


def saved(figure: Any, folder: Path) -> Any:
    """The figure's first axes; the file must be one."""
    assert save_figure(figure, folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    return figure.axes[0]


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


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to draw"):
        plots.draw_attention_loss({})
    with pytest.raises(ConfigError, match="nothing to draw for 'hkvd'"):
        plots.draw_kv_deviation({"hkvd": []})
    figure = plots.draw_attention_loss({"hkvd": [1.0]})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        save_figure(figure, tmp_path / "file" / "figure.png")
