"""Engine of a framework's object: given, of a server, or loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]

from cacheblend_rag.chunk import BLANK_LINE
from cacheblend_rag.config import BlendConfig, EngineConfig, SettingsBase, did_you_mean
from cacheblend_rag.engine import BlendEngine, Engine
from cacheblend_rag.errors import ConfigError, needs_extra

__all__ = ["encoding_bar", "given_engine", "model_engine", "offered", "refuse_unknown"]

_SHOWN_AFTER_S = 2.0

# What OpenAI's API offers and no engine here.
_PROBABILITIES = ("logprobs", "top_logprobs")
# Options of loading a model: llama.cpp's, which other libraries call otherwise, and transformers'.
_WINDOWS = ("context_length", "context_window", "max_model_len", "n_ctx", "num_ctx")
_LOADING = (
    *("n_threads", "n_gpu_layers", "n_seq_max", "type_k", "type_v"),
    *("attn_implementation", "device_map", "quantization_config", "revision", "trust_remote_code"),
)


def offered(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a call without those that ask for nothing; `ConfigError` for what no engine offers."""
    for name in _PROBABILITIES:
        if options.get(name) not in (None, False, 0):
            raise ConfigError(
                f"{name}={options[name]!r:.60} is not supported: answers come without the probabilities of their tokens; "
                "leave it out"
            )
    return {name: value for name, value in options.items() if name not in _PROBABILITIES}


def refuse_unknown(kind: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise `ConfigError` for parameters that a framework's model of this name does not have, saying where each belongs."""
    hints = [f"{name}{_belongs(name, known)}" for name in sorted(offered(given).keys() - set(known))]
    if hints:
        raise ConfigError(
            f"unknown parameter of {kind}: {'; '.join(hints)}. Options of generate go into generation_kwargs, those of loading "
            "into model_kwargs, settings into engine_config=EngineConfig(...) and blend_config=BlendConfig(...)"
        )


def _belongs(name: str, known: Collection[str]) -> str:
    """Return a hint where a parameter that is unknown belongs, or which one is like it."""
    settings = SettingsBase.kinds.get(name)
    if settings in (BlendConfig, EngineConfig):
        where = "blend_config" if settings is BlendConfig else "engine_config"
        return f", a setting: {where}={settings.__name__}({name}=...)"
    if name in _WINDOWS:
        return ", for GGUF files an option of loading: model_kwargs={'n_ctx': ...}"
    if name in _LOADING:
        return f", an option of loading: model_kwargs={{{name!r}: ...}}"
    return did_you_mean(name, known)


@contextmanager
def encoding_bar(count: int, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show how many of so many nodes are encoded, unless that is done at once; yields what `add` takes to tell it."""
    with tqdm(total=count, desc=f"Encoding {unit}s", unit=unit, delay=_SHOWN_AFTER_S) as bar:

        def show(finished: int, total: int) -> None:
            # Those without text are finished from the start; other chunks of their documents may be encoded again.
            bar.update(max(0, count - total + finished) - bar.n)

        yield show


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
