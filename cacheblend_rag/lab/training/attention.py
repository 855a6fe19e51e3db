"""Attention for training: many questions after one context, without computing what the block mask would throw away.

A dense mask over context and all questions spends most of the arithmetic on pairs of tokens that do not see each
other, and on a CPU attention is what training waits for.
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
    scaling: float,
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
    scaling
        What scores are multiplied by.
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
    count, heads, _, size = query.shape
    query = query * scaling
    context = [tensor[:, :, :context_length].flatten(0, 1) for tensor in (query, key, value)]
    causal = torch.ones(context_length, context_length, dtype=torch.bool, device=query.device).tril()
    # Products written out: the fused kernel's backward pass on CPUs takes several times longer at this head size.
    scores = context[0] @ context[1].transpose(1, 2)
    output = torch.softmax(scores.masked_fill(~causal, float("-inf")), -1) @ context[2]
    if attention_mask is not None:
        together = query[:, :, context_length:].flatten(0, 1)
        own = [tensor[:, :, context_length:].reshape(-1, question_length, size) for tensor in (query, key, value)]
        on_context = (together @ context[1].transpose(1, 2)).view(-1, question_length, context_length)
        on_question = own[0] @ own[1].transpose(1, 2)
        weights = torch.softmax(torch.cat([on_context, on_question], 2) + attention_mask[:, 0], -1)
        answers = weights[:, :, :context_length].reshape(count * heads, -1, context_length) @ context[2]
        answers = answers + (weights[:, :, context_length:] @ own[2]).view_as(answers)
        output = torch.cat([output, answers], 1)
    return output.view(count, heads, -1, size).transpose(1, 2), None


AttentionInterface.register(BRANCHED, branched_attention)
