"""Check that vLLM, as it was started, can take the KV of a store."""

from __future__ import annotations

from typing import Any

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.model import ModelCard

__all__ = ["TESTED", "check_fit"]

TESTED = ("0.32",)
"""The releases of vLLM that this connector was tested with."""


def check_fit(version: str, vllm_config: Any, kv_cache_config: Any, card: ModelCard) -> None:
    """See that vLLM's KV is that of the card.

    Raises
    ------
    ConfigError
        If it is not, or this connector does not know this release or kind of cache.
    """
    if not version.startswith(TESTED):
        raise ConfigError(
            f"this is vLLM {version}, and this connector was tested with {', '.join(TESTED)}; install that, or a newer "
            "vllm-cacheblend"
        )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"the model has KV caches of {len(groups)} kinds (full attention beside sliding windows, say), of which vLLM "
            "cannot take back what failed to load; serve it without this connector"
        )
    model = vllm_config.model_config
    if getattr(model, "use_mla", False):
        raise ConfigError(
            "the model has latent attention, whose cache this connector cannot write; serve it without it"
        )
    if model.dtype != card.dtype:
        raise ConfigError(
            f"vLLM runs the model in {_named(model.dtype)}, and the store's KV was computed in {_named(card.dtype)}; start both "
            "with one dtype"
        )
    cached = vllm_config.cache_config.cache_dtype
    if cached not in ("auto", _named(card.dtype)):
        raise ConfigError(f"kv_cache_dtype={cached!r} is not the dtype of the store's KV; leave it at auto")
    if getattr(model, "quantization", None) is not None:
        raise ConfigError(
            f"vLLM runs the model quantised ({model.quantization}), so its KV differs from that of the engine that filled "
            "the store"
        )
    layers = model.get_num_layers(vllm_config.parallel_config) * vllm_config.parallel_config.pipeline_parallel_size
    heads, size = model.get_total_num_kv_heads(), model.get_head_size()
    if vllm_config.parallel_config.pipeline_parallel_size != 1:
        raise ConfigError(
            "the layers are divided between machines (pipeline parallelism), which this connector does not support"
        )
    if (layers, {(heads, size, size)}) != (card.num_kv_layers, set(card.shapes)):
        raise ConfigError(
            f"vLLM's model has {layers} layers of {heads} KV heads of {size}, and the card says {card.num_kv_layers} layers of "
            f"{sorted(set(card.shapes))}; it is of another model"
        )


def _named(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
