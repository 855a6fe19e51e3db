"""Sampling that a seed repeats, whatever else is in the batch."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

__all__ = ["SeededSampling"]


class SeededSampling(LogitsProcessor):
    """Makes greedy decoding draw: to each token's score a number is added such that the greatest is a draw (Gumbel-max)."""

    is_of_one_answer = True

    def __init__(self, seed: int, temperature: float, top_k: int = 0, top_p: float = 1, min_p: float = 0) -> None:
        self._seed = seed
        self._prompt_len: int | None = None
        self._warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(temperature)]
        self._warpers += [TopKLogitsWarper(top_k)] if top_k else []
        self._warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        self._warpers += [MinPLogitsWarper(min_p)] if min_p else []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, ``(1, vocab)``, of which the greatest is the draw."""
        if self._prompt_len is None:
            self._prompt_len = input_ids.shape[1]
        for warper in self._warpers:
            scores = warper(input_ids, scores)
        generator = torch.Generator().manual_seed(
            (self._seed * 1_000_003 + input_ids.shape[1] - self._prompt_len) % 2**63
        )
        # Of numbers that are exponentially distributed, the negative logarithm is Gumbel-distributed.
        noise = -torch.empty(scores.shape, dtype=torch.float32).exponential_(generator=generator).log()
        return scores.float() + noise.to(scores.device)
