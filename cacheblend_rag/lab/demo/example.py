"""The question that shows best what is gained, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend_rag.demo.corpus import DemoChunk, Question, demo_chunks
from cacheblend_rag.lab.demo.run import Asked

__all__ = ["Example", "best_example", "explain"]

_SENTENCE = re.compile(r"(?<=\.)\s+")


@dataclass(frozen=True)
class Example:
    """A question that the default answers rightly, and full prefill of the same chunks does not.

    Attributes
    ----------
    asked : dict
        What was answered, by method.
    why : str
        What made the difference.
    """

    asked: dict[str, Asked]
    why: str


def best_example(asked: Sequence[Asked]) -> Example | None:
    """Return the question that tells the methods apart most clearly, or None if none does."""
    questions: dict[tuple[str, str], dict[str, Asked]] = {}
    for each in asked:
        questions.setdefault((each.framework, each.question.text), {})[each.method] = each
    found = []
    for answers in questions.values():
        blend = answers["blend"]
        why = explain(blend.question, blend.places, demo_chunks(blend.framework))
        if why is not None and blend.is_right and not answers["full"].is_right:
            found.append((answers["documents"].is_right, not answers["reuse"].is_right, Example(answers, why)))
    return max(found, key=lambda each: each[:2])[2] if found else None


def explain(question: Question, places: Sequence[int], chunks: Sequence[DemoChunk]) -> str | None:
    """Say how chunks that were taken out of their documents hide whom a sentence is about.

    Parameters
    ----------
    question : Question
        The question.
    places : sequence of int
        The chunks that were found, by their places among all, best first.
    chunks : sequence of DemoChunk
        All of them.

    Returns
    -------
    str or None
        None where nothing is hidden: the chunk that states the answer was not found, names its subject itself, or stands right
        behind the one that does.
    """
    if question.source not in places:
        return None
    stating = chunks[question.source]
    title, document = stating.metadata["title"], stating.metadata["document"]
    stated = [sentence for sentence in _SENTENCE.split(stating.text) if question.answer in sentence]
    before = [place for place in range(question.source) if chunks[place].metadata["document"] == document]
    naming = [place for place in before if title in chunks[place].text]
    if not stated or title in stating.text or not naming:
        return None
    if naming[-1] not in places:
        where = "was not retrieved"
    elif places.index(naming[-1]) > places.index(question.source):
        where = "stands behind it in the order of retrieval"
    elif places.index(naming[-1]) < places.index(question.source) - 1:
        where = "stands elsewhere in the order of retrieval"
    else:
        return None
    return (
        f"The answer is in “{stated[0]}”, and its chunk nowhere says who that is: {title} is named in a chunk before it, which "
        f"{where}. The default reads the chunk's KV as it was computed behind that chunk, inside its document."
    )
