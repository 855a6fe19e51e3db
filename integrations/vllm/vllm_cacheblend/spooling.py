"""Spooling from vLLM's paged cache to a file: KV that vLLM computed of a prompt, for the store."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from cacheblend_rag.errors import BackendError, ConfigError
from cacheblend_rag.kv import LayerKV
from vllm_cacheblend.slots import BlockIds

__all__ = ["BlockReader", "Spool", "own_folder", "read_spool", "remove_spool", "spool_path", "write_spool"]

# Numbers below these are exact in every dtype of two bytes or more, and in every one of one byte.
_BASE, _BASE_OF_BYTES = 128, 8


@dataclass(frozen=True, slots=True)
class Spool:
    """The KV of a request's prompt, which is to be written to a file as it is computed.

    Attributes
    ----------
    request_id : str
        Whose it is.
    name : str
        The file's name.
    count : int
        How many tokens the prompt has.
    first, stop : int
        Which of them are read now; those before `first` were read before.
    block_ids : BlockIds
        The request's blocks.
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
    a block of its own.

    Parameters
    ----------
    dtype : torch.dtype
        The model's, in which KV is written and read; blocks may keep it in fewer bits.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._orders: dict[tuple[Any, ...], torch.Tensor] = {}

    def rows(self, layer: Any, slots: torch.Tensor) -> LayerKV:
        """Return the KV in some slots of a layer of vLLM's.

        Returns
        -------
        LayerKV
            ``(num_kv_heads, len(slots), head_dim)`` each, on the CPU, as this rank has them.
        """
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
        """Return KV made of whole numbers, ``(2, ...)``, such as a layer's blocks keep exactly."""
        kind, scales = _kept_as(layer)
        base = _BASE if kind.itemsize > 1 else _BASE_OF_BYTES
        return LayerKV(*((part % base * scale).to(self._dtype) for part, scale in zip(numbers, scales, strict=True)))

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
            place, base = 1, _BASE if kind.itemsize > 1 else _BASE_OF_BYTES
            while place <= len(numbers):
                scratch = torch.zeros_like(cache[:1])
                keys, values = self.exact(layer, (numbers // place).view(shape))
                layer.impl.do_kv_cache_update(layer, keys.contiguous(), values.contiguous(), scratch, slots)
                found += scratch.flatten().view(kind).float().to(torch.int64) * place
                place *= base
            self._orders[known] = found.argsort()
        return self._orders[known]


def _kept_as(layer: Any) -> tuple[torch.dtype, tuple[float, float]]:
    """Return the dtype in which a layer's blocks keep KV, and what keys and values are divided by for it."""
    dtype: torch.dtype = layer.kv_cache.dtype
    if dtype.itemsize > 1:
        return dtype, (1, 1)
    kind = torch.float8_e5m2 if "e5m2" in layer.kv_cache_dtype else torch.float8_e4m3fn
    return kind, (layer._k_scale_float, layer._v_scale_float)


def own_folder(path: Path) -> Path:
    """Return a folder that only this user can open, made if nothing is there.

    Raises
    ------
    ConfigError
        If what is there is something else, made by a user who wants to read the KV, or to change it.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    # Of a link itself, not of what it leads to.
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path}, to which vLLM writes KV, must be a folder of the user {os.getuid()} that no other can open "
            f"(drwx------), and is {stat.filemode(found.st_mode)}, of the user {found.st_uid}; remove it"
        )
    return path


def spool_path(folder: Path, name: str, rank: int) -> Path:
    """Return the file of a tensor-parallel rank."""
    return folder / f"{name}.{rank}.safetensors"


def write_spool(path: Path, layers: Mapping[int, LayerKV]) -> None:
    """Write layers to a file, which is there when it is whole."""
    tensors = {
        f"{part}.{number}": tensor
        for number, kv in layers.items()
        for part, tensor in zip(("keys", "values"), kv, strict=True)
    }
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    os.replace(temporary, path)


def read_spool(folder: Path, name: str, heads: Sequence[int]) -> list[LayerKV]:
    """Return the layers that all ranks wrote, ``(num_kv_heads, count, head_dim)`` each, and remove the files in any case.

    Parameters
    ----------
    folder : Path
        Where they are.
    name : str
        Their name.
    heads : sequence of int
        How many KV heads each layer has. Where that is less than there are ranks, several ranks have the same.

    Raises
    ------
    BackendError
        If nothing was written, or what was written cannot be read.
    """
    paths = sorted(folder.glob(f"{name}.*.safetensors"), key=lambda path: int(path.name.split(".")[-2]))
    if not paths:
        raise BackendError(f"vLLM wrote no {spool_path(folder, name, 0)}; its log says why")
    try:
        return _joined([load_file(path) for path in paths], heads)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise BackendError(
            f"what vLLM wrote to {folder} under {name} cannot be read ({type(error).__name__}: {error}); add the chunks again"
        ) from error
    finally:
        remove_spool(folder, name)


def _joined(ranks: Sequence[Mapping[str, torch.Tensor]], heads: Sequence[int]) -> list[LayerKV]:
    """Return layers with the heads of all ranks; KeyError or ValueError if some are missing."""
    layers = []
    for number, count in enumerate(heads):
        step = max(1, len(ranks) // count)
        parts = [[rank[f"{part}.{number}"] for rank in ranks[::step]] for part in ("keys", "values")]
        kv = LayerKV(*(torch.cat(part) for part in parts))
        if len(kv.keys) != count:
            raise ValueError(f"layer {number} has {len(kv.keys)} KV heads instead of {count}")
        layers.append(kv)
    return layers


def remove_spool(folder: Path, name: str) -> None:
    """Remove what is left of a name's files, whole ones and half written ones."""
    for path in folder.glob(f"{name}.*"):
        path.unlink(missing_ok=True)
