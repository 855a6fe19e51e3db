"""Exact match and F1."""

from __future__ import annotations

import pytest

from cacheblend_rag.eval import exact_match, f1_score, normalize_answer


def test_normalising() -> None:
    assert normalize_answer(" The  White,  sheep. ") == "white sheep"
    assert normalize_answer("a an the") == ""
    assert normalize_answer("Anna's theatre") == "annas theatre"


@pytest.mark.parametrize(
    ("answer", "gold", "exact", "f1"),
    [
        ("Oslo", "oslo.", True, 1.0),
        ("a white sheep", "white sheep", True, 1.0),
        ("black sheep", "white sheep", False, 0.5),
        ("sheep", "white sheep", False, 2 / 3),
        ("sheep sheep", "sheep", False, 2 / 3),
        ("Oslo", "Bergen", False, 0.0),
        ("", "Bergen", False, 0.0),
        ("", "", True, 1.0),
    ],
)
def test_scores(answer: str, gold: str, exact: bool, f1: float) -> None:
    assert exact_match(answer, gold) is exact
    assert f1_score(answer, gold) == pytest.approx(f1)
    assert f1_score(gold, answer) == pytest.approx(f1)
