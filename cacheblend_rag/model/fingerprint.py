"""A digest of everything about a model that its KV depends on, and a watch over whether it is still true."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from cacheblend_rag.errors import ConfigError

__all__ = ["WeightsWatch", "model_fingerprint"]

# What a layer of PEFT says of itself: which of its adapters are at work, and how much.
_ADAPTER_ATTRIBUTES = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return a digest of weights, buffers, dtype, configuration (how it is quantised, too) and active adapters; 1 s for 2 GB."""
    scales = [pair for path, module in model.named_modules() for pair in _scales(path, module)]
    tensors = sorted([*model.named_parameters(), *model.named_buffers(), *scales], key=lambda item: item[0])
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_tensor_digest, [tensor for _, tensor in tensors]))
    whole = hashlib.blake2b(digest_size=16)
    for (name, tensor), digest in zip(tensors, digests, strict=True):
        whole.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        whole.update(digest)
    config = model.config.to_dict()
    for unrelated in ("_name_or_path", "transformers_version", "architectures", "torch_dtype"):
        config.pop(unrelated, None)
    whole.update(json.dumps(config, sort_keys=True, default=str).encode())
    # Several adapters may be loaded; switching between them changes no weight. Without any, nothing is appended.
    for name, module in _adapter_layers(model):
        whole.update(f"{name}|{_adapter_state(module)}|".encode())
    return whole.hexdigest()


class WeightsWatch:
    """Notices that a model was changed after its fingerprint was taken."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._name = type(model).__name__
        self._parameters = [
            (f"{path}.{name}", module, name, parameter, None if parameter.is_inference() else parameter._version)
            for path, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._adapters = [(name, module, _adapter_state(module)) for name, module in _adapter_layers(model)]

    def check(self) -> None:
        """Raise `ConfigError` if a weight was changed, or another adapter is at work."""
        for path, module, name, parameter, version in self._parameters:
            is_changed = version is not None and parameter._version != version
            if is_changed or module._parameters.get(name) is not parameter:
                raise ConfigError(
                    f"{path} of {self._name} was changed since this engine was made, and stored KV is that of the old weights; "
                    "make another engine for the new ones"
                )
        for path, module, state in self._adapters:
            now = _adapter_state(module)
            if now != state:
                raise ConfigError(
                    f"the adapters of {self._name} at {path} were {state} when this engine was made and are {now}; make one "
                    "engine for each adapter, and activate it before you call it"
                )


def _adapter_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if hasattr(module, "disable_adapters") and hasattr(module, "merged_adapters"):
            yield name, module


def _adapter_state(module: nn.Module) -> str:
    state: dict[str, Any] = {name: getattr(module, name, None) for name in _ADAPTER_ATTRIBUTES}
    return json.dumps(state, sort_keys=True, default=str)


def _scales(path: str, kept: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what bitsandbytes and HQQ keep beside a weight; their `state_dict` has it too, but may change the weight."""
    if isinstance(kept, nn.Module):
        weight, state, meta = kept._parameters.get("weight"), getattr(kept, "state", None), getattr(kept, "meta", None)
        blocks = getattr(weight, "quant_state", None)
        rows = [getattr(each, "SCB", None) for each in (weight, state)]
        kept = {"meta": meta, "blocks": blocks and blocks.as_dict(), **dict(enumerate(rows))}
    if isinstance(kept, torch.Tensor):
        yield path, kept
    elif isinstance(kept, dict):
        for name, each in kept.items():
            yield from _scales(f"{path}.{name}", each)


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    inside = getattr(tensor, "__tensor_flatten__", None)
    if inside is not None:
        # A quantised weight is a tensor made of several.
        names, context = inside()
        parts = [_tensor_digest(getattr(tensor, name)) for name in names]
        return hashlib.blake2b(b"".join(parts) + repr(context).encode(), digest_size=16).digest()
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).digest()
