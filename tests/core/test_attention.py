"""Attention weights as they are computed from what a layer's attention is called with."""

from __future__ import annotations

import torch

from cacheblend_rag.model import AttentionCall, attention_weights


def test_weights_are_those_of_a_softmax_for_grouped_heads() -> None:
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 4, 3, 8, generator=draw), torch.randn(1, 2, 9, 8, generator=draw)
    scores = torch.einsum("hqd,hkd->hqk", query[0], key[0].repeat_interleave(2, dim=0)) * 0.3
    # Without a mask the last rows are the last tokens: each sees what stands before it, and itself.
    later = torch.arange(9)[None, :] > torch.arange(6, 9)[:, None]
    wanted = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
    for window in (1, 3):
        got = attention_weights(AttentionCall(query, key, None, 0.3), window)
        assert (got - wanted[:, -window:]).abs().max() < 1e-6
    seen = torch.rand(1, 1, 3, 9, generator=draw) < 0.7
    seen[..., 0] = True
    masked = scores.masked_fill(~seen[0], -torch.inf).softmax(dim=-1)
    assert (attention_weights(AttentionCall(query, key, seen, 0.3), 3) - masked).abs().max() < 1e-6


def test_half_precision_does_not_overflow_where_the_kernel_does_not() -> None:
    query = torch.full((1, 1, 1, 128), 24.0, dtype=torch.float16)
    key = torch.full((1, 1, 3, 128), 24.0, dtype=torch.float16)
    weights = attention_weights(AttentionCall(query, key, None, 128**-0.5), 1)
    assert (weights - 1 / 3).abs().max() < 1e-3
