"""Slots of a request's tokens in vLLM's paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["blocks_of", "slots_of"]


def slots_of(block_ids: Sequence[int], block_size: int, first: int, stop: int) -> torch.Tensor:
    """Return the slot of each token of a request from `first` to before `stop`, int64, ``(stop - first,)``.

    Parameters
    ----------
    block_ids : sequence of int
        All blocks of the request, in order.
    block_size : int
        Tokens of a block.
    first, stop : int
        Which of its tokens.
    """
    places = torch.arange(first, stop)
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    return blocks[places // block_size] * block_size + places % block_size


def blocks_of(block_ids: Sequence[int], block_size: int, first: int, stop: int) -> list[int]:
    """Return the blocks that the tokens of a request from `first` to before `stop` are in."""
    return list(block_ids[first // block_size : -(-stop // block_size)])
