"""What a model says of the first token of an answer, and how far two such opinions are apart."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from cacheblend_rag.model import past_adapters, watch_forward

__all__ = ["FirstLogits", "TokenDistribution", "last_logits"]

_LARGEST = 256
# A token that the other distribution excludes would make the divergence infinite, and with it every mean.
_LEAST_PROBABILITY = 1e-12


@dataclass(frozen=True, eq=False)
class TokenDistribution:
    """The probabilities of the likeliest tokens, and what the others have together.

    A vocabulary of 150,000 tokens takes 600 KB a prompt; what is kept here takes 3 KB. Distances are those of the distributions
    with the other tokens taken as one, which can only be smaller than the whole ones, and are the same up to 256 tokens.

    Attributes
    ----------
    token_ids : torch.Tensor
        The likeliest tokens, ``(tokens,)``, int64.
    probabilities : torch.Tensor
        Their probabilities, ``(tokens,)``, float64.
    """

    token_ids: torch.Tensor
    probabilities: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor) -> TokenDistribution:
        """Return the distribution that logits, ``(vocab,)``, stand for."""
        probabilities, token_ids = _softmax(logits).topk(min(_LARGEST, logits.numel()))
        return cls(token_ids, probabilities)

    def kl_to(self, logits: torch.Tensor) -> float:
        """Return the Kullback-Leibler divergence of this distribution from that of logits ``(vocab,)``, in nats."""
        own, other = self._beside(logits)
        ratio = own.clamp(min=_LEAST_PROBABILITY).log() - other.clamp(min=_LEAST_PROBABILITY).log()
        return max(0.0, float((own * ratio).sum()))

    def distance_to(self, logits: torch.Tensor) -> float:
        """Return the total variation distance to the distribution of logits ``(vocab,)``: 0, the same, to 1, nothing shared."""
        own, other = self._beside(logits)
        return min(1.0, float((own - other).abs().sum()) / 2)

    def _beside(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        other = _softmax(logits)[self.token_ids]
        return _with_rest(self.probabilities), _with_rest(other)


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.detach().to("cpu", torch.float64).softmax(-1)


def _with_rest(probabilities: torch.Tensor) -> torch.Tensor:
    return torch.cat([probabilities, (1 - probabilities.sum(0, keepdim=True)).clamp(min=0)])


class FirstLogits:
    """Notes the logits of the last row of a model's first forward inside a ``with`` block, in this thread only.

    They are the model's own, before anything that decoding does to them, and are copied only: the answer does not wait for more.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model, whatever is around it, whose forward returns an object with `logits`, ``(1, rows, vocab)``.

    Attributes
    ----------
    logits : torch.Tensor or None
        Those logits, ``(vocab,)``, where the model put them; None before the first forward is over.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._thread = 0
        self._watch = ExitStack()
        self.logits: torch.Tensor | None = None

    def __enter__(self) -> FirstLogits:
        self.logits = None
        self._thread = threading.get_ident()
        self._watch.enter_context(watch_forward(self._model, after=self._note))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.close()

    def _note(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        del model, args, kwargs
        if self.logits is None and threading.get_ident() == self._thread:
            self.logits = output.logits[0, -1].detach().clone()


def last_logits(model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Cache | None) -> torch.Tensor:
    """Prefill a prompt and return the logits of the token behind it.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    inputs : dict
        The prompt's `input_ids`, ``(1, prompt_len)``, and what goes with them.
    cache : Cache or None
        The cache to fill; None where the model is to have one of its own, if any.

    Returns
    -------
    torch.Tensor
        ``(vocab,)``, where the model put them.
    """
    options: dict[str, Any] = {} if cache is None else {"past_key_values": cache, "use_cache": True}
    if model._supports_logits_to_keep():  # type: ignore[operator]  # as generate asks
        options["logits_to_keep"] = 1
    logits: torch.Tensor = past_adapters(model)(**inputs, **options).logits
    return logits[0, -1]
