"""Check that vLLM, as it was started, can take the KV of a store: by what it does, whatever its release."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model import ModelCard
from vllm_cacheblend.asking import Precision
from vllm_cacheblend.slots import Group, groups_of, slots_of
from vllm_cacheblend.spooling import BlockReader

__all__ = ["OTHERWISE", "PROVED", "Write", "check_blocks", "check_fit"]

PROVED = ("0.32",)
"""The releases of vLLM that all tests were run with; another brings no KV before `prove` has passed."""

OTHERWISE = f"install vLLM {', '.join(PROVED)} or a newer vllm-cacheblend, or use vLLM without this connector"
"""What to do where it is not."""

Write = Callable[[Any, LayerKV, torch.Tensor], None]
"""Writes KV, ``(num_kv_heads, seq_len, head_dim)``, into the slots of a layer of vLLM's."""

# A prime, so that numbers of the same place in two blocks differ.
_NUMBERS = 97


def check_fit(vllm_config: Any, kv_cache_config: Any, card: ModelCard, precision: Precision) -> None:
    """See that vLLM's KV is that of the card.

    Parameters
    ----------
    vllm_config, kv_cache_config : Any
        What vLLM tells its connectors.
    card : ModelCard
        The model's KV.
    precision : Precision
        How the model ran that computed the store's KV.

    Raises
    ------
    ConfigError
        If it is not, or the model has caches of a kind that holds no KV of single tokens.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if getattr(model, "use_mla", False):
        raise ConfigError(
            "the model has latent attention, whose cache this connector cannot write; use vLLM without it"
        )
    if model.dtype != card.dtype:
        raise ConfigError(
            f"vLLM runs the model in {_named(model.dtype)}, and the store's KV was computed in {_named(card.dtype)}; start both "
            "with one dtype"
        )
    runs = Precision(getattr(model, "quantization", None), vllm_config.cache_config.cache_dtype)
    # By its own name vLLM also says what runs the weights, which the store need not know.
    if (runs.quantization is None) != (precision.quantization is None):
        raise ConfigError(
            f"vLLM runs the model {_quantised(runs)}, and the store's KV was computed {_quantised(precision)}; let vLLM encode "
            "what it serves (`cacheblend-rag serve --backend vllm`)"
        )
    if runs.kv_cache_dtype not in (precision.kv_cache_dtype, _named(card.dtype)):
        raise ConfigError(
            f"vLLM keeps KV with kv_cache_dtype={runs.kv_cache_dtype!r}, and the store's was kept with "
            f"{precision.kv_cache_dtype!r}; let vLLM encode what it serves (`cacheblend-rag serve --backend vllm`)"
        )
    if runs.kv_cache_dtype not in ("auto", _named(card.dtype)) and not runs.kv_cache_dtype.startswith("fp8"):
        raise ConfigError(
            f"this connector cannot read KV of kv_cache_dtype={runs.kv_cache_dtype!r}; leave it at auto, or make it fp8"
        )
    if parallel.pipeline_parallel_size != 1:
        raise ConfigError(
            "the layers are divided between machines (pipeline parallelism), which this connector does not support"
        )
    shapes = _shapes(kv_cache_config)
    ranks = parallel.tensor_parallel_size
    wanted = [(max(1, heads // ranks), keys, values) for heads, keys, values in card.shapes]
    if shapes != wanted:
        raise ConfigError(
            f"vLLM's model has {len(shapes)} KV layers of {_said(shapes)} on each device, and the card has {len(wanted)} of "
            f"{_said(wanted)}; the card belongs to another model"
        )


def _shapes(kv_cache_config: Any) -> list[tuple[int, int, int]]:
    """Return the number of heads of each layer, and the sizes of a head of keys and of values."""
    found: dict[int, tuple[int, int, int]] = {}
    for group, each in zip(groups_of(kv_cache_config), kv_cache_config.kv_cache_groups, strict=True):
        for number, name in group.layers.items():
            # Layers of one group may differ in their shapes.
            spec = getattr(each.kv_cache_spec, "kv_cache_specs", {}).get(name, each.kv_cache_spec)
            try:
                found[number] = (spec.num_kv_heads, spec.head_size, spec.head_size_v)
            except AttributeError:
                raise ConfigError(
                    f"{name} keeps {type(spec).__name__}, not KV of each token; use vLLM without this connector"
                ) from None
    return [found[number] for number in sorted(found)]


def check_blocks(groups: tuple[Group, ...], layers: Mapping[str, Any], write: Write, reader: BlockReader) -> None:
    """Write numbers into the free blocks of each layer, across the border of two, and see that they are read back.

    Raises
    ------
    ConfigError
        If vLLM has no writer where this connector looks for it, or lays its blocks out in a way that it does not know.
    """
    for group in groups:
        for name in group.layers.values():
            layer: Any = layers.get(name)
            if not hasattr(getattr(layer, "impl", None), "do_kv_cache_update"):
                raise ConfigError(f"{name}: this vLLM has no writer of its cache (do_kv_cache_update); {OTHERWISE}")
            heads, size, last = layer.num_kv_heads, layer.head_size, group.block_size
            slots = slots_of((2, 1), last, last - min(5, last), last + min(3, last))
            numbers = torch.arange(2 * heads * len(slots) * size) % _NUMBERS
            try:
                known = reader.exact(layer, numbers.view(2, heads, len(slots), size))
                write(layer, known, slots)
                found = reader.rows(layer, slots)
            except Exception as error:
                raise ConfigError(
                    f"{name}: its blocks cannot be written and read back ({type(error).__name__}: {error}); {OTHERWISE}"
                ) from error
            for part, (wanted, given) in zip(("keys", "values"), zip(known, found, strict=True), strict=True):
                if not torch.equal(wanted, given):
                    wrong = int((wanted != given).sum())
                    raise ConfigError(
                        f"{name}: of {wanted.numel()} numbers written into blocks as {part}, {wrong} were read back differently: "
                        f"its cache {tuple(layer.kv_cache.shape)} has an unknown layout; {OTHERWISE}"
                    )
            write(layer, LayerKV(*map(torch.zeros_like, known)), slots)


def _named(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _quantised(runs: Precision) -> str:
    return "in full precision" if runs.quantization is None else f"quantised ({runs.quantization})"


def _said(shapes: list[tuple[int, int, int]]) -> str:
    return ", ".join(f"{heads} heads of {keys}/{values}" for heads, keys, values in sorted(set(shapes)))
