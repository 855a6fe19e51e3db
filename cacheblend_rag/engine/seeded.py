"""Sampling that a seed repeats, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cacheblend_rag.errors import ConfigError

__all__ = ["SeededSampling", "seeded"]

_DRAWN = ("temperature", "top_k", "top_p", "min_p")


def seeded(options: Mapping[str, Any], own: GenerationConfig) -> dict[str, Any]:
    """Return options of transformers' ``generate`` whose `seed`, which that does not have, is a processor that draws by it."""
    options = dict(options)
    seed = options.pop("seed", None)
    if seed is None:
        return options
    if type(seed) is not int:
        raise ConfigError(f"seed={seed!r:.40} must be a whole number")
    if options.get("do_sample", own.do_sample):
        given = {name: getattr(own, name) for name in _DRAWN} | {
            name: options.pop(name) for name in _DRAWN if name in options
        }
        # What transformers draws by where nothing is said.
        drawn = {"temperature": 1.0, "top_k": 50} | {name: value for name, value in given.items() if value is not None}
        options["logits_processor"] = [*options.get("logits_processor", ()), SeededSampling(seed, **drawn)]
        options["do_sample"] = False
    return options


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
