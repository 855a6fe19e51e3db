"""Which context tokens each head keeps: pure tensor code."""

from __future__ import annotations

import torch
from torch.nn import functional

from cacheblend_rag.model import AttentionCall, attention_weights

__all__ = ["choose_tokens", "context_attention"]


def context_attention(call: AttentionCall, window: int, start: int, stop: int) -> torch.Tensor:
    """Return the attention that the last rows pay to the context, computed from the layer's own queries and keys.

    Parameters
    ----------
    call : AttentionCall
        The layer's attention call, of one sequence, whose last rows are the last tokens of the prompt.
    window : int
        How many of the last rows observe; no more than stand behind the context.
    start, stop : int
        The half-open range of the context's rows.

    Returns
    -------
    torch.Tensor
        Attention weights summed over the observing rows and over the query heads that share a key head (SnapKV, section 4),
        float32, ``(num_kv_heads, stop - start)``.
    """
    weights = attention_weights(call, window)[..., start:stop]
    # Query heads that share a key head stand next to each other.
    return weights.sum(dim=1).view(call.key.shape[1], -1, stop - start).sum(dim=1)


def choose_tokens(attention: torch.Tensor, capacity: int, kernel: int) -> torch.Tensor:
    """Return the tokens that each head keeps.

    A token counts as much as the most attended one within the pooling window around it: what is attended to is kept with what
    surrounds it. Among equals, those that are attended to more themselves come first, then the earlier ones.

    Parameters
    ----------
    attention : torch.Tensor
        What `context_attention` returned, ``(num_kv_heads, context_len)``.
    capacity : int
        Tokens that each head keeps, at most `context_len`.
    kernel : int
        Length of the pooling window, odd.

    Returns
    -------
    torch.Tensor
        Indices into the context, ascending, int64, ``(num_kv_heads, capacity)``.
    """
    pooled = functional.max_pool1d(attention, kernel, stride=1, padding=kernel // 2)
    order = attention.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, pooled.gather(1, order).argsort(dim=1, descending=True, stable=True))
    return order[:, :capacity].sort(dim=1).values
