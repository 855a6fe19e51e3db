"""Loading a model and its tokenizer from the Hugging Face Hub or a folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cacheblend_rag.config import EngineConfig
from cacheblend_rag.errors import ConfigError, how_to_install

__all__ = ["GGUF_MAGIC", "default_dtype", "gguf_files", "load_pretrained", "model_folder"]

_log = logging.getLogger(__name__)

# What says where a checkpoint is, and so is as true of its tokenizer as of its weights.
_HUB_OPTIONS = frozenset(
    "cache_dir force_download local_files_only proxies revision subfolder token trust_remote_code".split()
)
# `dtype` is an option of the models as well.
_ONLY_SETTINGS = frozenset(EngineConfig.kinds) - {"dtype"}
# What processors with units for bfloat16 are known by: Intel and AMD, and Arm.
_BFLOAT16_UNITS = ("avx512_bf16", "amx_bf16", "bf16")
GGUF_MAGIC = b"GGUF"
"""What a GGUF file begins with."""


def load_pretrained(
    model: str | Path, config: EngineConfig, model_kwargs: dict[str, Any]
) -> tuple[PreTrainedModel, Any]:
    """Load a model, on its device, and its tokenizer, or raise `ConfigError`; see `BlendEngine.from_pretrained`."""
    settings = sorted(_ONLY_SETTINGS.intersection(model_kwargs))
    if settings:
        name, value = settings[0], model_kwargs[settings[0]]
        raise ConfigError(
            f"{name}={value!r} is a setting, not an option of the model; give it in {EngineConfig.kinds[name].__name__}"
        )
    name = _checked_name(model)
    if gguf_files(name):
        raise ConfigError(f"model {name} is a GGUF file, which llama.cpp answers: {how_to_install('gguf')}")
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    placed = "device_map" in model_kwargs
    if not placed:
        _check_device(device)
    hub_options = {option: value for option, value in model_kwargs.items() if option in _HUB_OPTIONS}
    try:
        dtype = config.torch_dtype() or default_dtype(name, device, hub_options)
        loaded = AutoModelForCausalLM.from_pretrained(name, **{"dtype": dtype, **model_kwargs})
        tokenizer = AutoTokenizer.from_pretrained(name, **hub_options)
    except (OSError, ValueError) as error:
        raise _not_loaded(model, error) from error
    except (ImportError, RuntimeError) as error:
        # What it was quantised with is missing, or it does not run, or fit, on this device.
        raise ConfigError(f"model {str(model)!r} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    if not placed:
        loaded = loaded.to(torch.device(device))  # type: ignore[arg-type]
    _log.info("%s is loaded in %s on %s", name, str(loaded.dtype).removeprefix("torch."), loaded.device)
    return loaded, tokenizer


def default_dtype(name: str, device: str = "cpu", options: Mapping[str, Any] | None = None) -> torch.dtype | str:
    """Return a checkpoint's own dtype, by name on a device other than the CPU; there float32 if it has no units for it."""
    options = options or {}
    if device != "cpu":
        return "auto"
    # Releases of torch that cannot tell have it computed in float32.
    known: Mapping[str, Any] = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    has_units = any(known.get(unit) for unit in _BFLOAT16_UNITS)
    if not has_units:
        return torch.float32
    try:
        own = AutoConfig.from_pretrained(name, **options).dtype
    # The folder may be an adapter's, and what is wrong with another is said when the model is loaded.
    except (OSError, ValueError):
        own = None
    return torch.bfloat16 if own == torch.bfloat16 else torch.float32


def model_folder(model: str | Path) -> Path:
    """Return the folder of a model, downloaded from the Hub if need be; `ConfigError` if it cannot be had."""
    name = _checked_name(model)
    if Path(name).is_dir():
        return Path(name)
    if gguf_files(name):
        raise ConfigError(f"model {name} is a GGUF file, but a folder with config.json and safetensors is needed here")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
    except OSError as error:
        raise _not_loaded(model, error) from error


def _not_loaded(model: str | Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"model {str(model)!r} cannot be loaded: {str(error).strip().splitlines()[0]} Give a Hugging Face id that can be "
        "reached, or a folder with a model and its tokenizer"
    )


def _checked_name(model: str | Path) -> str:
    """Return the folder or the Hugging Face id that `model` means."""
    name = str(model)
    for packaged in entry_points(group="cacheblend_rag.models", name=name):
        return str(packaged.load())
    folder = Path(model).expanduser()
    if folder.is_file() and not gguf_files(folder):
        raise ConfigError(
            f"model {name} cannot be loaded: it is a file, but not a GGUF file; give the folder that it is in"
        )
    if name.startswith((".", "/", "~")) or isinstance(model, Path) or gguf_files(name):
        if not folder.exists():
            hub = f"; for a file on the Hub: {how_to_install('gguf')}" if ":" in name else ""
            raise ConfigError(f"model {name} cannot be loaded: there is no such folder, and no such GGUF file{hub}")
        return str(folder)
    return name


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def gguf_files(model: str | Path) -> list[Path]:
    """Return the GGUF file that a model is by its name, or those in a folder that has no other model."""
    path = Path(model).expanduser()
    if path.is_file() and not _is_gguf(path):
        # Ollama's files have no suffix.
        with path.open("rb") as file:
            return [path] if file.read(len(GGUF_MAGIC)) == GGUF_MAGIC else []
    if not path.is_dir():
        return [path] if _is_gguf(path) else []
    return [] if (path / "config.json").exists() else sorted(filter(_is_gguf, path.iterdir()))


def _check_device(device: str) -> None:
    """See that a device is there, before a model is loaded for it."""
    try:
        torch.empty(1, device=device)
    # torch has no class of its own for what a missing device raises.
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"device={device!r} cannot be used: {str(error).strip().splitlines()[0]}; give one that exists, or leave device out"
        ) from error
