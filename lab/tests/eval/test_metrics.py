"""Every metric against values worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_lab.eval import Bootstrap, exact_match, f1_score
from cacheblend_lab.eval.metrics import (
    ClassificationAccuracy,
    best_exact_match,
    best_f1,
    count_accuracy,
    edit_similarity,
    needle_recall,
    retrieval_accuracy,
    rouge_l,
)
from cacheblend_lab.eval.task import Metric
from cacheblend_rag.errors import ConfigError


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


METRICS = [best_f1, best_exact_match, rouge_l, edit_similarity, count_accuracy, retrieval_accuracy]
METRICS += [needle_recall, ClassificationAccuracy(("a", "b"))]


@pytest.mark.parametrize(
    ("metric", "answer", "answers", "score"),
    [
        # two of three words, against two and against three
        (best_f1, "the white big sheep", ("white sheep", "sheep"), 0.8),
        (best_f1, "sheep", ("white sheep", "Sheep!"), 1.0),
        (best_f1, "The The", ("The The",), 1.0),
        (best_exact_match, "a sheep.", ("goat", "Sheep"), 1.0),
        (best_exact_match, "two sheep", ("goat", "Sheep"), 0.0),
        # longest common subsequence: cat sat mat, 3 of 5 and 3 of 4 words
        (rouge_l, "big cats sat near mat", ("cat sat on mat",), 2 * (3 / 5) * (3 / 4) / (3 / 5 + 3 / 4)),
        (rouge_l, "mat cat", ("goat", "cat mat"), 0.5),
        (rouge_l, "кот", ("кот",), 0.0),
        # common characters: "retrn 1", 7 of 7 and 8
        (edit_similarity, "retrn 1", ("return 1",), 14 / 15),
        (edit_similarity, "xyz", ("return 1",), 0.0),
        (count_accuracy, "There are 7, or 07 of 9.", ("7",), 2 / 3),
        (count_accuracy, "seven", ("7",), 0.0),
        (count_accuracy, "9" * 5000, ("9" * 5000,), 1.0),
        (retrieval_accuracy, "Paragraph 12", ("Paragraph 12",), 1.0),
        (retrieval_accuracy, "12 or 13", ("Paragraph 12",), 0.5),
        (retrieval_accuracy, "Paragraph 1", ("Paragraph 12",), 0.0),
        (retrieval_accuracy, "12", ("twelve",), 0.0),
        (needle_recall, "It is ALPHA, then beta.", ("alpha", "Beta", "gamma", "delta"), 0.5),
        (needle_recall, "x", (), 0.0),
        (ClassificationAccuracy(("Other location", "location")), "Type: Other location", ("Other location",), 1.0),
        (ClassificationAccuracy(("Price", "Other location", "location")), "location", ("Other location",), 0.0),
        (ClassificationAccuracy(("Price", "Other location", "location")), "Price, location", ("location",), 0.5),
        (ClassificationAccuracy(("Price", "Other location", "location")), "Other location", ("location",), 0.5),
        (ClassificationAccuracy(("Price", "Other location", "location")), "colour", ("Price",), 0.0),
    ],
)
def test_metrics(metric: Metric, answer: str, answers: tuple[str, ...], score: float) -> None:
    assert metric(answer, answers) == pytest.approx(score)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("answer", ["", " \n"])
def test_a_blank_answer_is_worth_nothing(metric: Metric, answer: str) -> None:
    for answers in (("a",), ("the",), ("7",), ("Paragraph 7",), ("",), ()):
        assert metric(answer, answers) == 0.0


@given(answer=st.text(max_size=30), answers=st.lists(st.text(max_size=30), max_size=3))
def test_any_answer_is_judged(answer: str, answers: list[str]) -> None:
    for metric in METRICS:
        score = metric(answer, tuple(answers))
        assert isinstance(score, float)
        assert 0.0 <= score <= 1.0


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(-1, 1)), min_size=1, max_size=40), st.integers(0, 5))
def test_an_interval_is_that_of_resampled_contexts(questions: list[tuple[int, float]], seed: int) -> None:
    bootstrap = Bootstrap(resamples=60, seed=seed)
    found = bootstrap.interval([value for _, value in questions], [context for context, _ in questions])
    contexts = sorted({context for context, _ in questions})
    means = []
    for draw in bootstrap.weights(len(contexts)):
        assert draw.sum() == len(contexts)
        drawn: list[float] = []
        for context, times in zip(contexts, draw, strict=True):
            for _ in range(int(times)):
                drawn += [value for own, value in questions if own == context]
        means.append(sum(drawn) / len(drawn))
    low, high = np.percentile(means, (2.5, 97.5))
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)
    assert found.mean == pytest.approx(sum(value for _, value in questions) / len(questions), abs=1e-9)


def test_a_share_is_that_of_the_sums() -> None:
    share = Bootstrap(500, 1).share([1.0, 3.0, 2.0], [2.0, 4.0, 2.0], [0, 0, 1])
    assert share.mean == 6 / 8
    # Of two contexts either one is drawn twice, or both.
    assert (share.low, share.high) == (4 / 6, 1.0)
    with pytest.raises(ConfigError, match="resamples=0"):
        Bootstrap(resamples=0)
