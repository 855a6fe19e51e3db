"""``cacheblend-rag models``: whether a model can be blended; and opening an engine by the name of its model."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli.output import console, make_quiet

if TYPE_CHECKING:
    from cacheblend_rag.config import BlendConfig, EngineConfig
    from cacheblend_rag.engine import BlendEngine

__all__ = ["models", "open_engine"]


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
) -> None:
    """Show whether blending is exact on a model, by running it; of a name, what was proved."""
    screen = console()
    for catalog in entry_points(group="cacheblend_rag.model_names"):
        if (proved := catalog.load()(name)) is not None:
            screen.print(f"{name}: {proved}", soft_wrap=True, markup=False)
            return
    with open_engine(name) as engine:
        reason = engine.unsupported_reason
    screen.print(f"{name}: {'exact' if reason is None else f'refused: {reason}'}", soft_wrap=True, markup=False)
