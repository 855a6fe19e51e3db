"""Engine of a framework's object: given, of a server, or loaded."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from cacheblend_rag.chunk import BLANK_LINE
from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.engine import BlendEngine, Engine
from cacheblend_rag.errors import ConfigError, needs_extra

__all__ = ["given_engine", "model_engine"]


def given_engine(engine: Any, server: str | None = None) -> Engine:
    """Return the engine that is given, that of the model that is given, or that of the server at an address.

    `ConfigError` if it is none of these, or several are given.
    """
    if engine is not None and server is not None:
        raise ConfigError("engine and server are both given; give only one of them")
    if server is not None:
        with needs_extra("serve", "server="):
            # A distribution above this one.
            found: Any = import_module("cacheblend_serve.client.engine").served_engine(server)
    else:
        found = engine if isinstance(engine, Engine) else getattr(engine, "engine", None)
    if not isinstance(found, Engine):
        what = "no engine is given" if engine is None else f"a {type(engine).__name__} has no engine"
        raise ConfigError(f"{what}; give that of the model, engine=llm.engine, or server=, the address of one")
    return found


def model_engine(
    model: str | Path | None,
    engine: Any,
    server: str | None,
    *,
    engine_config: EngineConfig | None,
    blend_config: BlendConfig | None,
    store: Any,
    model_kwargs: dict[str, Any] | None,
) -> Engine:
    """Return the engine that a framework's model is made with.

    One that is loaded counts on a blank line between chunks, as frameworks' prompts have it, unless its settings say otherwise.
    `ConfigError` if the arguments contradict each other.
    """
    if engine is None and server is None:
        if not isinstance(model, str | Path):
            raise ConfigError(
                "name a model (a Hugging Face id, a folder or a GGUF file), or give a ready-made engine, as "
                "BlendEngine(model, tokenizer), or the address of a server"
            )
        config = EngineConfig.of(engine_config)
        if "separator" not in config.model_fields_set:
            config = config.replace(separator=BLANK_LINE)
        return BlendEngine.from_pretrained(
            model, config=config, blend=blend_config, store=store, **(model_kwargs or {})
        )
    if store is not None or model_kwargs or engine_config is not None:
        raise ConfigError(
            "store, engine_config and model_kwargs apply when a model is loaded; a ready-made engine has them already"
        )
    found = given_engine(engine, server)
    if model is not None and not found.is_called(str(model)):
        raise ConfigError(
            f"model={str(model)!r:.200} is not {found.model_name!r}, the model of the given engine, which would answer under "
            "that name; leave model out, or make one object per model"
        )
    return found
