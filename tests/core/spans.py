"""The prompt that exactness is tested on: two chunks that touch and one behind text, longer than the windows of tiny models."""

import torch

from cacheblend_rag.layout import ChunkSpan, PromptLayout

__all__ = ["LENGTH", "SPANS", "random_ids", "span_layout"]

SPANS = ((5, 25), (25, 47), (50, 70))
LENGTH = 76


def random_ids(seed: int) -> list[int]:
    """Return the prompt's tokens, drawn from the tiny vocabulary."""
    return torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


def span_layout(ids: list[int]) -> PromptLayout:
    """Return the layout of tokens whose chunks are at `SPANS`."""
    return PromptLayout(tuple(ids), tuple(range(len(ids))), tuple(ChunkSpan(a, b, a) for a, b in SPANS))
