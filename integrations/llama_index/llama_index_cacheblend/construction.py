"""Making the engine behind a language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llama_index.core.settings import Settings

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from llama_index_cacheblend.nodes import SEPARATOR

__all__ = ["find_engine", "make_engine"]


def find_engine(engine: Any) -> BlendEngine:
    """Return the engine that an argument named ``engine`` means.

    Parameters
    ----------
    engine : BlendEngine, BlendLLM or None
        An engine, or what has one; None for that of ``Settings.llm``.

    Returns
    -------
    BlendEngine
        The engine.

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
    model: Any,
    tokenizer: Any,
    engine: Any,
    config: BlendConfig | None,
    store: Any,
    model_kwargs: dict[str, Any] | None,
) -> BlendEngine:
    """Return the engine that the arguments of `BlendLLM` describe.

    Parameters
    ----------
    model : str, Path or PreTrainedModel, optional
        "reference", a Hugging Face id, a folder, or a model object.
    tokenizer : Any, optional
        The tokenizer of a model object.
    engine : BlendEngine or BlendLLM, optional
        An engine to share, instead of all others.
    config : BlendConfig, optional
        Settings; where they say nothing of the separator, it is what stands between nodes in LlamaIndex's prompts.
    store : KVStore, str, Path or None
        Where KV is kept.
    model_kwargs : dict, optional
        How a model is loaded.

    Returns
    -------
    BlendEngine
        The engine.

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
        for name, value in (
            ("tokenizer", tokenizer),
            ("config", config),
            ("store", store),
            ("model_kwargs", model_kwargs),
        ):
            if value is not None:
                raise ConfigError(
                    f"{name} belongs to the engine; give it to BlendEngine, not to BlendLLM beside engine="
                )
        return find_engine(engine)
    config = BlendConfig.of(config)
    if "separator" not in config.model_fields_set:
        config = config.replace(separator=SEPARATOR)
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise ConfigError(
                f"model={str(model)!r} brings its own tokenizer; leave tokenizer out, or give a model object"
            )
        return BlendEngine.from_pretrained(model, config=config, store=store, **(model_kwargs or {}))
    if tokenizer is None:
        raise ConfigError(f"model is a {type(model).__name__} object; give its tokenizer too")
    if model_kwargs is not None:
        raise ConfigError("model_kwargs say how a model is loaded, and this one is loaded already; leave them out")
    return BlendEngine(model, tokenizer, config=config, store=store)
