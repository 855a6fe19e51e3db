"""``cacheblend-rag models``: what blending does in each layer of a model; and opening an engine by the name of its model."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli.options import MarkdownOption
from cacheblend_rag.cli.output import console, make_quiet, show_table

if TYPE_CHECKING:
    from cacheblend_rag.config import BlendConfig, EngineConfig
    from cacheblend_rag.engine import BlendEngine
    from cacheblend_rag.model import Capability

__all__ = ["models", "open_engine", "show_layers"]


def open_engine(
    model: str,
    *,
    store: Path | None = None,
    config: EngineConfig | None = None,
    blend: BlendConfig | None = None,
    **changes: Any,
) -> BlendEngine:
    """Load a model by name, quietly, with the environment's settings by default, and `changes` to `blend` that are not None."""
    from cacheblend_rag.config import BlendConfig
    from cacheblend_rag.engine import BlendEngine

    make_quiet()
    blend = BlendConfig.of(blend).replace(**{name: value for name, value in changes.items() if value is not None})
    return BlendEngine.from_pretrained(model, config=config, blend=blend, store=store)


def models(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help='A Hugging Face id, a folder, or what people call it ("Llama 3").'),
    ],
    markdown: MarkdownOption = None,
) -> None:
    """Show whether blending is exact on a model, by running it, and what it does in each layer; of a name, what was proved."""
    for catalog in entry_points(group="cacheblend_rag.model_names"):
        if (proved := catalog.load()(name)) is not None:
            show_layers(name, proved, None, markdown)
            return
    with open_engine(name) as engine:
        reason = engine.unsupported_reason
        show_layers(name, "exact" if reason is None else f"refused: {reason}", engine.capability(), markdown)


def show_layers(name: str, verdict: str, seen: Capability | None, markdown: Path | None) -> None:
    """Print a verdict and a table of layers, if they are known, and write both as Markdown where that is asked for."""
    console().print(f"{name}: {verdict}", soft_wrap=True, markup=False)
    rows = []
    if seen is not None:
        columns = ("layer", "attention", "positions in its KV", "blending")
        lines = [(str(layer.number), layer.attention, layer.positions, layer.blending) for layer in seen.layers]
        show_table(f"{seen.model}, {seen.dtype}", columns, lines, text_columns=4)
        rows = ["", *("| " + " | ".join(line) + " |" for line in (columns, ("---",) * 4, *lines))]
    if markdown is not None:
        markdown.write_text("\n".join([f"{name}: {verdict}", *rows, ""]), encoding="utf-8")
