"""Where vLLM's paged KV cache has a request's tokens, of each kind of layers in blocks of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["BlockIds", "Group", "blocks_of", "first_held", "groups_of", "layer_number", "slots_of"]

BlockIds = tuple[tuple[int, ...], ...]
"""All blocks of a request, in order, of each group of layers."""

# vLLM puts this one where a sliding window has passed a request's own.
_NO_BLOCK = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose KV is in the same blocks of each request.

    Attributes
    ----------
    block_size : int
        Tokens of a block.
    layers : mapping of int to str
        Their names by their numbers among all layers that have KV.
    """

    block_size: int
    layers: Mapping[int, str]


def layer_number(name: str) -> int:
    """Return the number in a layer's name: which of the model's layers it is."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def groups_of(kv_cache_config: Any) -> tuple[Group, ...]:
    """Return vLLM's groups; layers that attend to the KV of others are in none."""
    found = kv_cache_config.kv_cache_groups
    names = sorted((name for each in found for name in each.layer_names), key=layer_number)
    numbers = {name: number for number, name in enumerate(names)}
    return tuple(
        Group(each.kv_cache_spec.block_size, {numbers[name]: name for name in each.layer_names}) for each in found
    )


def first_held(block_ids: Sequence[int], block_size: int) -> int:
    """Return the first token of a request that still has a block; a sliding window drops those before it."""
    dropped = next((place for place, block in enumerate(block_ids) if block != _NO_BLOCK), len(block_ids))
    return dropped * block_size


def slots_of(block_ids: Sequence[int], block_size: int, first: int, stop: int) -> torch.Tensor:
    """Return the slot of each token of a request from `first` to before `stop`, int64, ``(stop - first,)``."""
    places = torch.arange(first, stop)
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    return blocks[places // block_size] * block_size + places % block_size


def blocks_of(block_ids: Sequence[int], block_size: int, first: int, stop: int) -> list[int]:
    """Return the blocks that the tokens of a request from `first` to before `stop` are in."""
    return list(block_ids[first // block_size : -(-stop // block_size)])
