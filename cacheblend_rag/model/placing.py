"""Running tokens at a position of choice, so that their KV shows what it owes to the position."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model.cache import KVCache

__all__ = ["kv_at", "takes_positions"]


def takes_positions(decoder: nn.Module) -> bool:
    """Return whether positions are an argument of a decoder's forward; else it counts the tokens in its cache."""
    return "position_ids" in inspect.signature(decoder.forward).parameters


@torch.no_grad()
def kv_at(decoder: nn.Module, num_layers: int, ids: torch.Tensor, position: int) -> list[LayerKV]:
    """Return the KV of tokens that see each other and nothing else, the first of them at `position`.

    Parameters
    ----------
    decoder : nn.Module
        The part of a model that its head stands on.
    num_layers : int
        Its layers.
    ids : torch.Tensor
        Token ids, int64, ``(batch, seq_len)``.
    position : int
        Where the first of them stands.

    Returns
    -------
    list of LayerKV
        The KV of those layers that have any, ``(batch, num_kv_heads, seq_len, head_dim)``.
    """
    cache = KVCache(num_layers)
    if takes_positions(decoder):
        positions = position + torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        decoder(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        return cache.kv()
    # Such a model counts; what stands before the tokens is masked as padding is.
    before = ids[:, :1].expand(-1, position)
    mask = torch.ones(len(ids), position + ids.shape[1], dtype=torch.int64, device=ids.device)
    mask[:, :position] = 0
    decoder(input_ids=torch.cat((before, ids), dim=1), attention_mask=mask, past_key_values=cache, use_cache=True)
    return [LayerKV(*(part[:, :, position:] for part in kv)) for kv in cache.kv()]
