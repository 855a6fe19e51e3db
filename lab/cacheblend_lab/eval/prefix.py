"""Prefix caching: the model's own KV of the beginning of a prompt, and the model's own forward over the rest."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteriaList

from cacheblend_rag.engine.generation import TokenWatch

__all__ = ["PrefixAnswer", "PrefixCache"]


@dataclass(frozen=True)
class PrefixAnswer:
    """An answer after a cached prefix.

    Attributes
    ----------
    token_ids : tuple of int
        The generated ids, an end token included.
    ttft_s : float
        Seconds to the first of them, the copy of the cache included.
    seconds : float
        Seconds to the last.
    mean_logprob : float
        Mean log-probability that the model gave to the generated ids; minus infinity without any.
    """

    token_ids: tuple[int, ...]
    ttft_s: float
    seconds: float
    mean_logprob: float


class PrefixCache:
    """The exact KV of a prompt's first tokens, computed once; every use gets a copy, unless it takes none."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, token_ids: Sequence[int]) -> None:
        self._model = model
        self.token_ids = tuple(token_ids)
        self._cache = DynamicCache(config=model.config)
        ids = torch.tensor([self.token_ids], device=model.device)
        model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def logits(self, rest: torch.Tensor, copies: bool = True) -> torch.Tensor:
        """Return the logits after the prefix and `rest`, ``(vocab,)``; without a copy, the cache is cut back to the prefix."""
        cache = copy.deepcopy(self._cache) if copies else self._cache
        logits: torch.Tensor = self._model(
            input_ids=rest, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        if not copies:
            cache.crop(-rest.shape[1])
        return logits[0, -1]

    @torch.no_grad()
    def answer(self, token_ids: Sequence[int], max_new_tokens: int, pad_token_id: int | None) -> PrefixAnswer:
        """Decode greedily after a prompt that begins with the prefix and goes on after it."""
        assert tuple(token_ids[: len(self.token_ids)]) == self.token_ids and len(token_ids) > len(self.token_ids)
        started = time.perf_counter()
        watch = TokenWatch(threading.Event())
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        options: dict[str, Any] = {}
        if self._model.generation_config.pad_token_id is None:
            options["pad_token_id"] = pad_token_id
        output = self._model.generate(  # type: ignore[operator]  # transformers' stubs take it for a tensor
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=copy.deepcopy(self._cache),
            max_new_tokens=max_new_tokens,
            stopping_criteria=StoppingCriteriaList([watch]),
            do_sample=False,
            num_beams=1,
            num_return_sequences=1,
            cache_implementation=None,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        seconds = time.perf_counter() - started
        generated = output.sequences[0, len(token_ids) :]
        scores = [
            float(logits[0].float().log_softmax(-1)[token])
            for logits, token in zip(output.logits, generated.tolist(), strict=True)
        ]
        mean = sum(scores) / len(scores) if scores else -float("inf")
        first_s = watch.times[0] - started if watch.times else seconds
        return PrefixAnswer(tuple(generated.tolist()), first_s, seconds, mean)
