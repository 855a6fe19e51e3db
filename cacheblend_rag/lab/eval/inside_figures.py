"""Drawing what blending changes inside the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cacheblend_rag.lab.eval.inside_result import REUSE, InsideResult
from cacheblend_rag.lab.eval.overlap import draw_overlap
from cacheblend_rag.lab.eval.plots import (
    draw_attention_deviation,
    draw_attention_loss,
    draw_kv_deviation,
    draw_rank_correlation,
)
from cacheblend_rag.lab.eval.spread import Spread
from cacheblend_rag.lab.figures import save_figure

__all__ = ["draw_inside"]

_DRAWN_LAYERS = 5


def draw_inside(result: InsideResult, label: str, folder: Path, ending: str = "svg") -> list[Path]:
    """Draw CacheBlend's Figures 6, 7 and 8 and A3's Figures 2 and 3.

    Parameters
    ----------
    result : InsideResult
        The data.
    label : str
        The model's name.
    folder : Path
        Where the files go; it is made where it is missing.
    ending : str
        The format: svg, png or pdf.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    ConfigError
        If matplotlib is not installed, or a file cannot be written.
    """
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
