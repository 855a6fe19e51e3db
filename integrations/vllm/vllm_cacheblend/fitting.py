"""Check that vLLM, as it was started, can take the KV of a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model import ModelCard
from vllm_cacheblend.asking import Precision
from vllm_cacheblend.loading import Group, groups_of, slots_of
from vllm_cacheblend.spooling import BASE, BlockReader

__all__ = ["check_blocks", "check_fit", "check_release"]

_TESTED = "0.32"
_UNTESTED_VARIABLE = "ALLOW_UNTESTED_VLLM"
_OTHERWISE = f"install vLLM {_TESTED} or a newer vllm-cacheblend, or use vLLM without this connector"
_BY_VLLM = "let vLLM encode what it serves (`cacheblend-rag serve --backend vllm`)"


def check_release(version: str) -> None:
    """Refuse a release of vLLM that was not tested, unless the environment says that it may be tried."""
    if not version.startswith(f"{_TESTED}.") and not os.environ.get(_UNTESTED_VARIABLE):
        raise ConfigError(
            f"this is vLLM {version}, with which this connector was not tested; {_OTHERWISE}, or set {_UNTESTED_VARIABLE}=1 and "
            "compare some answers with those of vLLM without it"
        )


def check_fit(vllm_config: Any, kv_cache_config: Any, card: ModelCard, precision: Precision) -> None:
    """See that vLLM's KV is that of the card; `precision` is how the model ran that computed the store's."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if getattr(model, "use_mla", False) or parallel.pipeline_parallel_size != 1:
        raise ConfigError(
            "the model has latent attention, or its layers are divided between machines (pipeline parallelism), which this "
            "connector does not support; use vLLM without it"
        )
    if model.hf_overrides:
        raise ConfigError(
            f"vLLM runs the model with hf_overrides={model.hf_overrides!r:.200}, and the store's KV was computed without; change "
            "the model's config.json instead"
        )
    if card.rope_reach is not None and model.max_model_len > card.rope_reach:
        raise ConfigError(
            f"from token {card.rope_reach} on the model's rotary frequencies change, and with them all KV; start vLLM with "
            f"max_model_len={card.rope_reach} (--max-model-len)"
        )
    if model.dtype != card.dtype:
        raise ConfigError(
            f"vLLM runs the model in {model.dtype}, and the store's KV was computed in {card.dtype}; start both with one dtype"
        )
    # By its own name of a method vLLM also says what runs the weights, which the store need not know.
    if (model.quantization is None) != (precision.quantization is None):
        raise ConfigError(
            f"vLLM runs the model with quantization={model.quantization!r}, and the store's KV was computed with "
            f"{precision.quantization!r}; {_BY_VLLM}"
        )
    kept, own = vllm_config.cache_config.cache_dtype, str(card.dtype).removeprefix("torch.")
    if kept not in (precision.kv_cache_dtype, own):
        raise ConfigError(
            f"vLLM keeps KV with kv_cache_dtype={kept!r}, and the store's was kept with {precision.kv_cache_dtype!r}; {_BY_VLLM}"
        )
    shapes = _shapes(kv_cache_config)
    wanted = [(max(1, heads // parallel.tensor_parallel_size), keys, values) for heads, keys, values in card.shapes]
    if shapes != wanted:
        raise ConfigError(
            f"vLLM's model has {len(shapes)} KV layers of (heads, size of keys, size of values) {sorted(set(shapes))} on each "
            f"device, and the card has {len(wanted)} of {sorted(set(wanted))}; the card belongs to another model"
        )


def _shapes(kv_cache_config: Any) -> list[tuple[int, int, int]]:
    """Return the number of heads of each layer, and the sizes of a head of keys and of values."""
    found: dict[int, tuple[int, int, int]] = {}
    for group, each in zip(groups_of(kv_cache_config), kv_cache_config.kv_cache_groups, strict=True):
        for number, name in group.layers.items():
            # Layers of one group may differ in their shapes.
            spec = getattr(each.kv_cache_spec, "kv_cache_specs", {}).get(name, each.kv_cache_spec)
            if not hasattr(spec, "num_kv_heads"):
                raise ConfigError(
                    f"{name} keeps no KV of each token ({type(spec).__name__}); use vLLM without this connector"
                )
            found[number] = (spec.num_kv_heads, spec.head_size, spec.head_size_v)
    return [found[number] for number in sorted(found)]


def check_blocks(
    groups: tuple[Group, ...],
    layers: Mapping[str, Any],
    write: Callable[[Any, LayerKV, torch.Tensor], None],
    reader: BlockReader,
) -> None:
    """Write numbers into the free blocks of each layer, across the border of two, and see that they are read back.

    `write` puts KV, ``(num_kv_heads, seq_len, head_dim)``, into the slots of a layer of vLLM's.
    """
    for group in groups:
        for name in group.layers.values():
            layer: Any = layers.get(name)
            try:
                heads, size, last = layer.num_kv_heads, layer.head_size, group.block_size
                slots = slots_of((2, 1), last, last - min(5, last), last + min(3, last))
                # By a prime, so that numbers at the same place of two blocks differ.
                numbers = torch.arange(2 * heads * len(slots) * size) % (BASE - 1)
                known = reader.exact(layer, numbers.view(2, heads, len(slots), size))
                write(layer, known, slots)
                found = reader.rows(layer, slots)
            except Exception as error:
                raise ConfigError(
                    f"{name}: its blocks cannot be written and read back ({type(error).__name__}: {error}); {_OTHERWISE}"
                ) from error
            if not all(map(torch.equal, known, found)):
                raise ConfigError(
                    f"{name}: numbers written into its blocks are read back differently: its cache "
                    f"{tuple(layer.kv_cache.shape)} has an unknown layout; {_OTHERWISE}"
                )
            write(layer, LayerKV(*map(torch.zeros_like, known)), slots)
