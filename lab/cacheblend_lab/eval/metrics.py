"""Metrics of answers, as SQuAD, ROUGE and LongBench define them.

`exact_match` and `f1_score` compare an answer with one right answer. The others are metrics
(`cacheblend_lab.eval.task.Metric`): they take an answer and all right answers, give the best that any of these
gives, from 0 to 1, and 0 for an answer that is blank.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from cacheblend_attachments.answers import exact_match, f1_score, holds_answer, normalize_answer
from cacheblend_rag.extras import needs_extra

__all__ = [
    "ClassificationAccuracy",
    "best_exact_match",
    "best_f1",
    "count_accuracy",
    "edit_similarity",
    "exact_match",
    "f1_score",
    "holds_one",
    "needle_recall",
    "normalize_answer",
    "paragraph_number",
    "retrieval_accuracy",
    "rouge_l",
]

_NUMBER = re.compile(r"[0-9]+")
_PARAGRAPH = re.compile(r"\bParagraph ([0-9]+)")


def best_exact_match(answer: str, answers: tuple[str, ...]) -> float:
    """Return 1 if the answer is one of the right ones once normalised, else 0."""
    return _best(exact_match, answer, answers)


def holds_one(answer: str, answers: tuple[str, ...]) -> float:
    """Return 1 if the words of one of the right answers stand in the answer once normalised, else 0."""
    return _best(holds_answer, answer, answers)


def best_f1(answer: str, answers: tuple[str, ...]) -> float:
    """Return the F1 over words once normalised (CacheBlend, section 7.1, for 2WikiMQA and MuSiQue)."""
    return _best(f1_score, answer, answers)


def rouge_l(answer: str, answers: tuple[str, ...]) -> float:
    """Return the F-measure of Rouge-L with Porter stemming, by the package rouge-score (CacheBlend, section 7.1, for summaries).

    Only words of ASCII letters and digits count, as that package has it.
    """
    return _best(lambda text, gold: _rouge_scorer().score(gold, text)["rougeL"].fmeasure, answer, answers)


def edit_similarity(answer: str, answers: tuple[str, ...]) -> float:
    """Return how alike two lines of code are: twice the longest common subsequence of characters over both lengths.

    This is `rapidfuzz.fuzz.ratio`, which LongBench's ``fuzz.ratio`` comes to before it rounds to a hundredth.
    """
    return _best(lambda text, gold: _ratio()(text, gold) / 100, answer, answers)


def count_accuracy(answer: str, answers: tuple[str, ...]) -> float:
    """Return the share of the numbers in the answer that are the right one (LongBench, passage_count)."""
    return _best(_share_of_numbers, answer, answers)


def retrieval_accuracy(answer: str, answers: tuple[str, ...]) -> float:
    """Return the share of the numbers in the answer that are that of the right paragraph (LongBench, passage_retrieval_en).

    A right answer has the form ``Paragraph 7``; one that has not is never met.
    """
    return _best(lambda text, gold: _share_of_numbers(text, paragraph_number(gold)), answer, answers)


def paragraph_number(gold: str) -> str:
    """Return the digits in ``Paragraph 7``; empty if there are none."""
    found = _PARAGRAPH.search(gold)
    return found.group(1) if found else ""


def needle_recall(answer: str, answers: tuple[str, ...]) -> float:
    """Return the share of the needles, all of which are wanted, that stand in the answer; case does not count."""
    if not answer.strip() or not answers:
        return 0.0
    text = answer.lower()
    return sum(each.lower() in text for each in answers) / len(answers)


@dataclass(frozen=True, slots=True)
class ClassificationAccuracy:
    """Whether an answer names the right class and no other (LongBench, trec); a metric.

    A class counts as named if its name stands in the answer, unless it is only a part of the right class's name. With n classes
    named, the right one among them, the answer is worth 1/n.

    Attributes
    ----------
    classes : tuple of str
        The names of all classes.
    """

    classes: tuple[str, ...]

    def __call__(self, answer: str, answers: tuple[str, ...]) -> float:
        """Judge an answer."""
        return _best(self._score, answer, answers)

    def _score(self, answer: str, gold: str) -> float:
        named = {each for each in self.classes if each in answer and (each == gold or each not in gold)}
        return 1 / len(named) if gold in named else 0.0


def _best(score: Callable[[str, str], float], answer: str, answers: tuple[str, ...]) -> float:
    if not answer.strip():
        return 0.0
    return max((float(score(answer, gold)) for gold in answers), default=0.0)


def _share_of_numbers(answer: str, wanted: str) -> float:
    # Compared as digits: int() refuses very long ones.
    numbers = [_digits(each) for each in _NUMBER.findall(answer)]
    right = _digits(wanted.strip())
    return numbers.count(right) / len(numbers) if numbers else 0.0


def _digits(number: str) -> str:
    return (number.lstrip("0") or "0") if number else ""


@cache
def _rouge_scorer() -> Any:
    with needs_extra("lab", "Rouge-L"):
        from rouge_score.rouge_scorer import RougeScorer
    return RougeScorer(["rougeL"], use_stemmer=True)


@cache
def _ratio() -> Callable[[str, str], float]:
    with needs_extra("lab", "edit similarity"):
        from rapidfuzz.fuzz import ratio
    return ratio
