"""Figures: one way to make them and to write them, wherever they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.extras import needs_extra

__all__ = ["needs_drawing", "new_figure", "save_figure"]


def needs_drawing() -> None:
    """See that what draws is installed, before a command measures what it is to draw."""
    with needs_extra("lab", "drawing"):
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401


def new_figure(
    panels: int = 1, *, width: float = 5.5, height: float = 4.2, stacked: Sequence[float] = ()
) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, side by side, or where `stacked` has shares of the height, one below the other.

    Width and height are inches of each; of all of them where they are stacked.
    """
    needs_drawing()
    import matplotlib.backends.backend_agg
    import matplotlib.figure

    # Without pyplot there is no window, no display, and no list of figures that must be closed.
    across = 1 if stacked else panels
    figure = matplotlib.figure.Figure(figsize=(across * width, height), layout="constrained")
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    if stacked:
        return figure, list(figure.subplots(panels, 1, sharex=True, squeeze=False, height_ratios=stacked)[:, 0])
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure to a file, whose ending says the format; its folder is made where it is missing."""
    from matplotlib import rc_context

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The same figure is the same file, and text in it stays text.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be drawn: {error}; take a name that ends in .png, .svg or .pdf") from error
    return path
