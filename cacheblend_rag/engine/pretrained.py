"""Loading a model and its tokenizer by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cacheblend_rag.config import EngineConfig
from cacheblend_rag.errors import ConfigError

__all__ = ["load_pretrained"]

# What says where a checkpoint is, and so is as true of its tokenizer as of its weights.
_HUB_OPTIONS = frozenset(
    {
        "cache_dir",
        "force_download",
        "local_files_only",
        "proxies",
        "revision",
        "subfolder",
        "token",
        "trust_remote_code",
    }
)
# `dtype` is an option of the models as well.
_ONLY_SETTINGS = frozenset(EngineConfig.kinds) - {"dtype"}
_REFERENCE_NAME = "reference"
_REFERENCE = Path(__file__).parents[1] / "reference" / "weights"


def load_pretrained(
    model: str | Path, config: EngineConfig, model_kwargs: dict[str, Any]
) -> tuple[PreTrainedModel, Any]:
    """Load a model and its tokenizer; see `BlendEngine.from_pretrained`.

    Parameters
    ----------
    model : str or Path
        A Hugging Face id, a folder, or "reference".
    config : EngineConfig
        `dtype` and `device` say how the model is loaded.
    model_kwargs : dict
        Passed to ``AutoModelForCausalLM.from_pretrained``.

    Returns
    -------
    model, tokenizer
        Both, the model on its device.

    Raises
    ------
    ConfigError
        If there is no such model, it cannot be reached, its device is not there, or an option is one of the engine's settings.
    """
    settings = sorted(_ONLY_SETTINGS.intersection(model_kwargs))
    if settings:
        name, value = settings[0], model_kwargs[settings[0]]
        raise ConfigError(
            f"{name}={value!r} belongs to the settings, not to the model; give it in {EngineConfig.kinds[name].__name__}"
        )
    name = _checked_name(model)
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    placed = "device_map" in model_kwargs
    if not placed:
        _check_device(device)
    dtype = config.torch_dtype() or (torch.float32 if device == "cpu" else "auto")
    options = {"dtype": dtype} | model_kwargs
    try:
        loaded = AutoModelForCausalLM.from_pretrained(name, **options)
        hub_options = {option: value for option, value in model_kwargs.items() if option in _HUB_OPTIONS}
        tokenizer = AutoTokenizer.from_pretrained(name, **hub_options)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {str(model)!r} cannot be loaded: {str(error).strip().splitlines()[0]} Give a Hugging Face id that can be "
            'reached, a folder with a model and its tokenizer, or "reference"'
        ) from error
    if not placed:
        loaded = loaded.to(torch.device(device))  # type: ignore[arg-type]
    return loaded, tokenizer


def _checked_name(model: str | Path) -> str:
    """Return the folder or the Hugging Face id that `model` means."""
    name = str(model)
    if model == _REFERENCE_NAME:
        return str(_REFERENCE)
    if name.startswith((".", "/", "~")) or isinstance(model, Path):
        folder = Path(model).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"model {name} cannot be loaded: there is no such folder")
        return str(folder)
    # No id on the Hub is this alone, and asking there takes its time.
    if name.strip().lower() == _REFERENCE_NAME and not Path(name).is_dir():
        raise ConfigError(
            f'model {name!r} cannot be loaded: the model that comes with this package is "{_REFERENCE_NAME}"'
        )
    return name


def _check_device(device: str) -> None:
    """See that a device is there, before a model is loaded for it."""
    try:
        torch.empty(1, device=device)
    # torch has no class of its own for what a missing device raises.
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"device={device!r} cannot be used: {str(error).strip().splitlines()[0]}; give one that is there, or leave device out"
        ) from error
