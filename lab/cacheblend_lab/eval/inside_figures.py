"""Drawing what blending changes inside the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cacheblend_lab.eval.inside import TokenOverlap
from cacheblend_lab.eval.inside_result import REUSE, InsideResult
from cacheblend_lab.eval.plots import (
    draw_attention_deviation,
    draw_attention_loss,
    draw_kv_deviation,
    draw_rank_correlation,
)
from cacheblend_lab.eval.statistics import Spread
from cacheblend_lab.figures import new_figure, save_figure

__all__ = ["draw_inside", "draw_overlap"]

_DRAWN_LAYERS = 5


def draw_inside(result: InsideResult, label: str, folder: Path, ending: str = "svg") -> list[Path]:
    """Draw CacheBlend's Figures 6, 7 and 8 and A3's Figures 2 and 3."""
    by_ratio: dict[str, dict[float, float | Spread]] = {}
    by_charge: dict[str, dict[float, float | Spread]] = {}
    loss: dict[str, tuple[float, ...]] = {}
    for row in result.rows:
        if row.selector != REUSE:
            by_ratio.setdefault(row.selector, {})[row.ratio] = row.attention_deviation
            by_charge.setdefault(row.selector, {})[row.charged_ratio] = row.attention_deviation
        if row.selector == REUSE or row.ratio == result.shown_ratio:
            loss[row.selector] = row.by_layer
    figures: dict[str, Any] = {
        "attention-deviation": draw_attention_deviation(by_ratio),
        "attention-deviation-by-charge": draw_attention_deviation(by_charge, "charged ratio"),
        "attention-overlap": draw_overlap(result.overlap),
        "attention-loss": draw_attention_loss(loss),
    }
    # A model of a single layer has none that has seen a neighbour, and one of two layers has no two neighbours that have.
    layers = list(result.kv_deviation)
    if layers:
        places = np.unique(np.linspace(0, len(layers) - 1, _DRAWN_LAYERS).round().astype(int))
        shown = {f"layer {layers[place]}": result.kv_deviation[layers[place]] for place in places}
        figures["kv-deviation"] = draw_kv_deviation(shown, "KV deviation, over the mean of the layer")
    if result.correlation:
        figures["rank-correlation"] = draw_rank_correlation({label: result.correlation})
    return [save_figure(figure, folder / f"{name}.{ending}") for name, figure in figures.items()]


def draw_overlap(overlap: TokenOverlap) -> Any:
    """Draw the question's attention, and which of the tokens it attends to are recomputed (A3, Figure 2).

    Attention stands above; below it a row of high-attention tokens, then a row for each method with the tokens that it
    recomputes, dark where they are high-attention tokens.
    """
    heights = (2.6, 0.3 * (1 + len(overlap.recomputed)))
    figure, [above, below] = new_figure(2, width=11, height=1.2 + sum(heights), stacked=heights)
    high = overlap.high_attention
    rows = np.zeros((1 + len(overlap.recomputed), overlap.attention.shape[1]))
    rows[0, high] = 1.0
    for row, tokens in zip(rows[1:], overlap.recomputed.values(), strict=True):
        row[tokens] = np.where(np.isin(tokens, high), 1.0, 0.35)
    # A few tokens carry most of the attention; with a linear scale nothing else would be seen.
    above.imshow(np.sqrt(overlap.attention), aspect="auto", cmap="Blues", interpolation="nearest")
    above.set(ylabel="question token", title="attention of the question (square root)")
    above.yaxis.get_major_locator().set_params(integer=True)
    below.imshow(rows, aspect="auto", cmap="Greens", vmin=0, vmax=1, interpolation="nearest")
    labels = [f"{method}: {overlap.hit_rate(method):.0%} hit" for method in overlap.recomputed]
    below.set_yticks(range(len(rows)), [f"high attention ({overlap.top})", *labels])
    below.set(xlabel="chunk token")
    return figure
