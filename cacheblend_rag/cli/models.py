"""Opening an engine by the name of its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheblend_rag.config import BlendConfig
    from cacheblend_rag.engine import BlendEngine

__all__ = ["open_engine"]


def open_engine(
    model: str,
    *,
    store: Path | None = None,
    kind: type[BlendEngine] | None = None,
    config: BlendConfig | None = None,
    **settings: Any,
) -> BlendEngine:
    """Load a model for blending, quietly.

    Parameters
    ----------
    model : str
        A Hugging Face id, a folder, or "reference".
    store : Path, optional
        The folder of its KV; by default RAM.
    kind : type[BlendEngine], optional
        The class of engine to make.
    config : BlendConfig, optional
        The settings; by default the environment's.
    **settings : Any
        Settings that differ from those; None means not given.

    Returns
    -------
    BlendEngine
        The engine.

    Raises
    ------
    ConfigError
        If the model cannot be found, or a setting has no meaning.
    """
    from cacheblend_rag.cli.output import make_quiet
    from cacheblend_rag.config import BlendConfig
    from cacheblend_rag.engine import BlendEngine

    make_quiet()
    changes = {name: value for name, value in settings.items() if value is not None}
    config = BlendConfig(**changes) if config is None else config.replace(**changes)
    return (kind or BlendEngine).from_pretrained(model, config=config, store=store)
