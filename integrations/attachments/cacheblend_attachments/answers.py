"""Equality of two answers, and the share of their common words, as SQuAD defines them."""

from __future__ import annotations

import re
import string
from collections import Counter

__all__ = ["exact_match", "f1_score", "holds_answer", "normalize_answer"]

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
