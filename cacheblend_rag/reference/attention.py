"""Attention for training: many questions after one context, without computing what the block mask would throw away.

A dense mask over context and all questions spends most of the arithmetic on pairs of tokens that do not see each other, and on a CPU
attention is what training waits for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

__all__ = ["BRANCHED", "branched_attention"]

BRANCHED = "cacheblend_branched"
"""The name under which transformers knows it."""


def branched_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    context_length: int | None = None,
    question_length: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within the context causally, and from each question to the context and itself.

    Parameters
    ----------
    module
        The attention module (unused).
    query, key, value
        ``(batch, heads, context_length + questions * question_length, head_dim)``.
    attention_mask
        :meth:`Batch.question_mask`, or None without questions; where `context_length` is None, a mask over all tokens.
    context_length, question_length
        The grid's measures; None asks for ordinary attention.
    **kwargs
        What transformers passes besides (unused).

    Returns
    -------
    tuple
        The output ``(batch, tokens, heads, head_dim)``, and no weights.
    """
    # Rotary embedding may have widened the queries and keys.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if context_length is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=attention_mask).transpose(1, 2), None
    contexts = [tensor[:, :, :context_length] for tensor in (query, key, value)]
    output = scaled_dot_product_attention(*contexts, is_causal=True)
    if attention_mask is not None:
        count, heads, _, size = query.shape
        own = [
            tensor[:, :, context_length:].reshape(count, heads, -1, question_length, size).transpose(1, 2)
            for tensor in (query, key, value)
        ]
        questions = own[0].shape[1]
        seen = [
            torch.cat([shared[:, None].expand(-1, questions, -1, -1, -1), tensor], 3).flatten(0, 1)
            for shared, tensor in zip(contexts[1:], own[1:], strict=True)
        ]
        answers = scaled_dot_product_attention(own[0].flatten(0, 1), *seen, attn_mask=attention_mask.to(value.dtype))
        answers = answers.reshape(count, questions, heads, question_length, size).transpose(1, 2).flatten(2, 3)
        output = torch.cat([output, answers], 2)
    return output.transpose(1, 2), None


AttentionInterface.register(BRANCHED, branched_attention)
