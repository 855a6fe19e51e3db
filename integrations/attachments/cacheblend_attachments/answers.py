"""Measures of an answer: equality and common words, as SQuAD defines them, and the loss of the right one."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import torch
from torch.nn import functional

from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.engine.protocol import PrefillResult

__all__ = ["exact_match", "f1_score", "holds_answer", "normalize_answer", "right_losses", "written_after"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Return a text in lower case without punctuation, articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> bool:
    """Return whether two answers are the same once normalised."""
    return normalize_answer(answer) == normalize_answer(gold)


def holds_answer(answer: str, gold: str) -> bool:
    """Return whether the normalised words of `gold` stand in an answer, one after the other."""
    return f" {normalize_answer(gold)} " in f" {normalize_answer(answer)} "


def f1_score(answer: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over the words of two normalised answers."""
    words, wanted = normalize_answer(answer).split(), normalize_answer(gold).split()
    if not words or not wanted:
        return float(words == wanted)
    shared = sum((Counter(words) & Counter(wanted)).values())
    return 2 * shared / (len(words) + len(wanted))


def written_after(answer: str, tail: object) -> str:
    """Return an answer as a model would write it after the last segment of a prompt: with a space, unless text ends in one."""
    return answer if isinstance(tail, str) and tail[-1:].isspace() else f" {answer}"


def right_losses(
    engine: BlendEngine, prompt: BlendPrompt, right: Sequence[int], blend: BlendConfig
) -> tuple[PrefillResult, torch.Tensor]:
    """Prefill a prompt, without positions, with the right answer after it.

    Returns the result, with the logits after the prompt and after each token of the answer, and the negative log-probability of
    each of these, in nats, float32.
    """
    answered = BlendPrompt(segments=[*prompt.segments, right], skip_unknown=prompt.skip_unknown)
    result = engine.prefill(answered, blend=blend, logits_to_keep=len(right) + 1)
    losses = functional.cross_entropy(result.logits[:-1].float(), torch.tensor(right), reduction="none")
    # What is certain may round to just below 0.
    return result, losses.clamp(min=0)
