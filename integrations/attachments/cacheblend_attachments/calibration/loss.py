"""Losses of the right answer after a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.engine.generation import PrefillResult

__all__ = ["right_losses", "written_after"]


def written_after(answer: str, tail: object) -> str:
    """Return an answer as a model would write it after the last segment of a prompt: with a space, unless text ends in one."""
    return answer if isinstance(tail, str) and tail[-1:].isspace() else f" {answer}"


def right_losses(
    engine: BlendEngine, prompt: BlendPrompt, right: Sequence[int], blend: BlendConfig
) -> tuple[PrefillResult, torch.Tensor]:
    """Prefill a prompt with the right answer after it.

    Parameters
    ----------
    engine : BlendEngine
        The engine.
    prompt : BlendPrompt
        The prompt, without positions.
    right : sequence of int
        The tokens of the answer.
    blend : BlendConfig
        Settings of the call.

    Returns
    -------
    PrefillResult
        Its logits are those after the prompt and after each token of the answer, ``(len(right) + 1, vocab)``.
    torch.Tensor
        The negative log-probability of each token of the answer, in nats, float32, ``(len(right),)``.
    """
    answered = BlendPrompt(segments=[*prompt.segments, right], skip_unknown=prompt.skip_unknown)
    result = engine.prefill(answered, blend=blend, logits_to_keep=len(right) + 1)
    losses = functional.cross_entropy(result.logits[:-1].float(), torch.tensor(right), reduction="none")
    # What is certain may round to just below 0.
    return result, losses.clamp(min=0)
