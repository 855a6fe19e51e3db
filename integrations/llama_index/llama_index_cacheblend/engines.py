"""The engine behind a language model or a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llama_index.core.settings import Settings

from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend.nodes import SEPARATOR

__all__ = ["find_engine", "make_engine"]


def find_engine(engine: Any) -> BlendEngine:
    """Return the engine that an argument named ``engine`` means: an engine, or what has one; None for that of ``Settings.llm``.

    Raises
    ------
    ConfigError
        If it is none.
    """
    # `Settings.llm` would make a default model where none is set.
    given = Settings._llm if engine is None else engine
    found = given if isinstance(given, BlendEngine) else getattr(given, "engine", None)
    if not isinstance(found, BlendEngine):
        what = (
            "nobody says which engine computes the KV"
            if engine is None
            else f"engine={str(engine)[:80]!r} is a {type(engine).__name__}, which computes no KV"
        )
        raise ConfigError(f"{what}; pass engine=llm.engine, or set Settings.llm to a BlendLLM")
    return found


def make_engine(
    model: Any, engine: Any, config: EngineConfig | None, blend: BlendConfig | None, **loading: Any
) -> BlendEngine:
    """Return the engine that the arguments of `BlendLLM` describe; `loading` are tokenizer, store and model_kwargs.

    Where the settings say nothing of the separator, it is what stands between nodes in LlamaIndex's prompts.

    Raises
    ------
    ConfigError
        If the arguments contradict each other, or `engine` is none.
    """
    if (model is None) == (engine is None):
        raise ConfigError(
            'give BlendLLM either a model ("reference", a Hugging Face id, a folder, or an object) or an engine'
        )
    if engine is not None:
        beside = next(
            (name for name, value in {"config": config, "blend_config": blend, **loading}.items() if value is not None),
            None,
        )
        if beside is not None:
            raise ConfigError(f"{beside} belongs to the engine; give it to BlendEngine, not to BlendLLM beside engine=")
        return find_engine(engine)
    tokenizer, store, model_kwargs = loading["tokenizer"], loading["store"], loading["model_kwargs"]
    config = EngineConfig.of(config)
    if "separator" not in config.model_fields_set:
        config = config.replace(separator=SEPARATOR)
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise ConfigError(
                f"model={str(model)!r} brings its own tokenizer; leave tokenizer out, or give a model object"
            )
        return BlendEngine.from_pretrained(model, config=config, blend=blend, store=store, **(model_kwargs or {}))
    if tokenizer is None:
        raise ConfigError(f"model is a {type(model).__name__} object; give its tokenizer too")
    if model_kwargs is not None:
        raise ConfigError("model_kwargs say how a model is loaded, and this one is loaded already; leave them out")
    return BlendEngine(model, tokenizer, config=config, blend=blend, store=store)
