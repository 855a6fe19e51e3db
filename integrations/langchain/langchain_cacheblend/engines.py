"""The engine that an object of this package is given."""

from __future__ import annotations

from typing import Any

from cacheblend_rag import BlendEngine
from cacheblend_rag.errors import ConfigError

__all__ = ["check_engine"]


def check_engine(engine: Any) -> None:
    """Raise `ConfigError` for what is no engine."""
    if not isinstance(engine, BlendEngine):
        held = isinstance(getattr(engine, "engine", None), BlendEngine)
        raise ConfigError(
            f"engine is a {type(engine).__name__}, no BlendEngine; give "
            + ("its .engine" if held else "that of the model, llm.engine")
        )
