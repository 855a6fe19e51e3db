"""Exact match and F1 of answers, as SQuAD defines them."""

from __future__ import annotations

from cacheblend_rag.answers import exact_match, f1_score, normalize_answer

__all__ = ["exact_match", "f1_score", "normalize_answer"]
