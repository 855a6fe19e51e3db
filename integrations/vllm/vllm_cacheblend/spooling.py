"""Spooling: KV that vLLM computed of a prompt, read out of its blocks and handed to the store's process in a file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cacheblend_rag.errors import BackendError
from cacheblend_rag.kv import LayerKV
from vllm_cacheblend.loading import BlockIds

__all__ = ["BASE", "BlockReader", "Spool", "read_spool", "remove_spool", "spool_folder", "write_spool"]

BASE = 8
"""Whole numbers below it are exact in every dtype of KV, those of one byte too."""


@dataclass(frozen=True, slots=True)
class Spool:
    """The KV of a request's prompt, which is to be written to a file as it is computed.

    `first` to `stop` are the tokens that are read now, of `count`; those before were read before.
    """

    request_id: str
    name: str
    count: int
    first: int = 0
    stop: int = 0
    block_ids: BlockIds = ()


class BlockReader:
    """Reads tokens out of a layer's blocks, however the backend lays these out.

    The backend has a writer and no reader. Where its writer puts each number is found out by having it write numbered ones into
    a block of its own. KV is written and read in the model's dtype; blocks may keep it in fewer bits.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._orders: dict[tuple[Any, ...], torch.Tensor] = {}

    def rows(self, layer: Any, slots: torch.Tensor) -> LayerKV:
        """Return this rank's KV in some slots of a layer of vLLM's, ``(num_kv_heads, len(slots), head_dim)``, on the CPU."""
        cache, heads, size = layer.kv_cache, layer.num_kv_heads, layer.head_size
        # The backend's own blocks may be parts of those that vLLM counts in.
        block_size = cache[0].numel() // (2 * heads * size)
        used, which = (slots // block_size).unique(return_inverse=True)
        numbers = cache.index_select(0, used.to(cache.device)).flatten(1)[:, self._order(layer, block_size)].cpu()
        kv = numbers.view(-1, 2, block_size, heads, size)[which, :, slots % block_size].transpose(0, 1)
        kind, scales = _kept_as(layer)
        if kind.itemsize == 1:
            kv = torch.stack([part.float() * scale for part, scale in zip(kv.view(kind), scales, strict=True)])
        keys, values = (part.to(self._dtype).transpose(0, 1).contiguous() for part in kv)
        return LayerKV(keys, values)

    def exact(self, layer: Any, numbers: torch.Tensor) -> LayerKV:
        """Return KV of whole numbers below `BASE`, ``(2, ...)``, which a layer's blocks keep exactly."""
        _, scales = _kept_as(layer)
        return LayerKV(*((part * scale).to(self._dtype) for part, scale in zip(numbers, scales, strict=True)))

    def _order(self, layer: Any, block_size: int) -> torch.Tensor:
        """Return at which place of a block, flattened, each number is: keys and then values, ``(2, tokens, heads, head_dim)``."""
        cache = layer.kv_cache
        known = (cache.shape[1:], cache.dtype, layer.num_kv_heads, layer.head_size)
        if known not in self._orders:
            shape = (2, block_size, layer.num_kv_heads, layer.head_size)
            numbers = torch.arange(2 * block_size * layer.num_kv_heads * layer.head_size, device=cache.device)
            slots = torch.arange(block_size, device=cache.device)
            found = torch.zeros_like(cache[:1].flatten(), dtype=torch.int64)
            kind, _ = _kept_as(layer)
            place = 1
            while place <= len(numbers):
                scratch = torch.zeros_like(cache[:1])
                keys, values = self.exact(layer, (numbers // place % BASE).view(shape))
                layer.impl.do_kv_cache_update(layer, keys.contiguous(), values.contiguous(), scratch, slots)
                found += scratch.flatten().view(kind).float().to(torch.int64) * place
                place *= BASE
            self._orders[known] = found.argsort()
        return self._orders[known]


def _kept_as(layer: Any) -> tuple[torch.dtype, tuple[float, float]]:
    """Return the dtype in which a layer's blocks keep KV, and what keys and values are divided by for it."""
    dtype: torch.dtype = layer.kv_cache.dtype
    if dtype.itemsize > 1:
        return dtype, (1, 1)
    kind = torch.float8_e5m2 if "e5m2" in layer.kv_cache_dtype else torch.float8_e4m3fn
    return kind, (layer._k_scale_float, layer._v_scale_float)


def spool_folder(store: str | Path) -> Path:
    """Return the folder in a store's that vLLM writes to: only those open it who may read the store, which clears it up."""
    return Path(store) / "tmp"


def write_spool(folder: Path, name: str, rank: int, layers: Mapping[int, LayerKV]) -> None:
    """Write the layers of a tensor-parallel rank to a file, which is there when it is whole."""
    tensors = {f"keys.{number}": kv.keys for number, kv in layers.items()}
    tensors |= {f"values.{number}": kv.values for number, kv in layers.items()}
    temporary = folder / f"{name}.{rank:03}.part"
    save_file(tensors, temporary)
    os.replace(temporary, temporary.with_suffix(".safetensors"))


def read_spool(folder: Path, name: str, heads: Sequence[int]) -> list[LayerKV]:
    """Return the layers that all ranks wrote, ``(num_kv_heads, count, head_dim)`` each, and remove the files in any case.

    `heads` is how many KV heads each layer has. Where that is less than there are ranks, several ranks have the same.
    """
    try:
        ranks = [load_file(path) for path in sorted(folder.glob(f"{name}.*.safetensors"))]
        layers = []
        for number, count in enumerate(heads):
            parts = [rank for place, rank in enumerate(ranks) if place % max(1, len(ranks) // count) == 0]
            kv = LayerKV(*(torch.cat([rank[f"{part}.{number}"] for rank in parts]) for part in ("keys", "values")))
            if len(kv.keys) != count:
                raise ValueError(f"layer {number} has {len(kv.keys)} KV heads instead of {count}")
            layers.append(kv)
        return layers
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise BackendError(
            f"what vLLM wrote to {folder} under {name} is not there or not whole ({type(error).__name__}: {error}); its log says "
            "why; add the chunks again"
        ) from error
    finally:
        remove_spool(folder, name)


def remove_spool(folder: Path, name: str) -> None:
    """Remove what is left of a name's files, whole ones and half written ones."""
    for path in folder.glob(f"{name}.*"):
        path.unlink(missing_ok=True)
