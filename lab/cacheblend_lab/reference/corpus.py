"""The demonstration's documents and the questions about them.

``python -m cacheblend_lab.training.corpus`` writes the file that they are read from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = [
    "CORPUS_FILE",
    "Document",
    "Question",
    "demo_documents",
    "demo_questions",
]

CORPUS_FILE = Path(__file__).with_name("corpus.json")


@dataclass(frozen=True)
class Document:
    """A text about one subject, already cut into chunks.

    Attributes
    ----------
    title : str
        The subject's name.
    chunks : tuple of str
        One or two sentences each, in reading order. The first names the subject; later ones may say only "She".
    """

    title: str
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A question about some documents, whose chunks are counted through.

    Attributes
    ----------
    text : str
        What is asked.
    answer : str
        The value alone (``Ashford``); all of the sentence where that is a comparison or says that the context does not say. It is
        what exact match and F1 are measured on.
    sentence : str
        The whole sentence that the reference model learns to write; its last words are the answer.
    kind : str
        What kind of question it is: ``single``, ``pronoun``, ``two_hop``, ``comparison`` or ``unanswerable``.
    support : tuple of int
        Indices of the chunks that are needed, in order; for a pronoun also the chunk that names its subject. None where no chunk
        has the answer.
    source : int
        The index of the chunk that states the answer; of a comparison, the later one; -1 where no chunk does.
    """

    text: str
    answer: str
    sentence: str
    kind: str
    support: tuple[int, ...]
    source: int


def demo_documents() -> list[Document]:
    """Return the demonstration's ten documents."""
    return [Document(each["title"], tuple(each["chunks"])) for each in _corpus()["documents"]]


def demo_questions(count: int = 12) -> list[Question]:
    """Return the first questions about :func:`demo_documents`, of all kinds in turn."""
    return [Question(**each | {"support": tuple(each["support"])}) for each in _corpus()["questions"][:count]]


@cache
def _corpus() -> dict[str, list[dict[str, Any]]]:
    parts: dict[str, list[dict[str, Any]]] = json.loads(CORPUS_FILE.read_text(encoding="utf-8"))
    return parts
