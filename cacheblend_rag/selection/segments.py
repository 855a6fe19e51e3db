"""Picking rows by score, one by one or in segments: neighbouring tokens of one chunk that are taken together."""

from __future__ import annotations

import torch

from cacheblend_rag.layout import PromptLayout

__all__ = ["pick", "segment_numbers"]


def segment_numbers(layout: PromptLayout, rows: torch.Tensor, segment_tokens: int) -> torch.Tensor:
    """Return the segment of each chunk row, from 0 on; chunks are cut into as few as possible, of like length. All ascend."""
    starts: list[int] = []
    for span in layout.chunks:
        count = -(-len(span) // segment_tokens)
        starts += [span.start + number * len(span) // count for number in range(count)]
    return torch.searchsorted(torch.tensor(starts, device=rows.device), rows, right=True) - 1


def pick(
    scores: torch.Tensor, rows: torch.Tensor, budget: int, layout: PromptLayout, segment_tokens: int = 1
) -> torch.Tensor:
    """Return the `budget` rows of the highest scores, ascending, or all; there is a score for each of `rows`, which ascend,
    int64.

    A token's KV is computed from the tokens before it in its sentence as much as from other chunks. Recomputed alone among
    stale neighbours, it stays stale; recomputed with them, it does not. So whole segments are taken, by their mean score,
    and the best tokens of the one that does not fit any more. Segments of one token take each for itself.
    """
    budget = min(budget, rows.numel())
    if segment_tokens > 1 and budget:
        # Segments by their mean, earlier ones first among equals; a token's own score decides where not all of one fit.
        order = scores.double().argsort(descending=True, stable=True)
        numbers = segment_numbers(layout, rows, segment_tokens)
        total = torch.zeros(int(numbers[-1]) + 1, dtype=torch.float64, device=scores.device)
        total.index_add_(0, numbers, scores.double())
        means = (total / torch.bincount(numbers).clamp_min(1))[numbers]
        order = order[numbers[order].argsort(stable=True)]
        chosen = order[means[order].argsort(descending=True, stable=True)][:budget]
    else:
        # Not topk, which takes any of equals: where nothing was measured all are.
        chosen = scores.argsort(descending=True, stable=True)[:budget]
    return rows[chosen.sort().values.to(rows.device)]
