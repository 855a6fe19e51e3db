"""Documents about a fictional world with questions about them: the demonstration's, and held-out contexts for tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["Document", "Example", "Question", "demo_documents", "demo_questions", "examples"]


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
        The whole sentence that the model has learnt to write; its last words are the answer.
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


@dataclass(frozen=True)
class Example:
    """Documents about three people and perhaps a company, who are nobody else's, and up to eight questions about them."""

    documents: tuple[Document, ...]
    questions: tuple[Question, ...]

    @property
    def chunks(self) -> tuple[str, ...]:
        """The chunks of all documents in order: 12 to 18, of a sentence or two."""
        return tuple(chunk for document in self.documents for chunk in document.chunks)


def demo_documents() -> list[Document]:
    """Return the demonstration's ten documents."""
    return _documents(_read("corpus.json")["documents"])


def demo_questions(count: int = 12) -> list[Question]:
    """Return the first questions about :func:`demo_documents`, of all kinds in turn."""
    return _questions(_read("corpus.json")["questions"][:count])


def examples(num_questions: int) -> list[Example]:
    """Return contexts with so many questions together, at most 512, always the same.

    Their names, values and templates are none that the model was trained on.
    """
    contexts = _read("people.json")["contexts"][: -(-num_questions // _QUESTIONS)]
    return [
        Example(
            tuple(_documents(each["documents"])),
            tuple(_questions(each["questions"])[: num_questions - number * _QUESTIONS]),
        )
        for number, each in enumerate(contexts)
    ]


# Of each context in people.json.
_QUESTIONS = 8


def _documents(found: list[dict[str, Any]]) -> list[Document]:
    return [Document(each["title"], tuple(each["chunks"])) for each in found]


def _questions(found: list[dict[str, Any]]) -> list[Question]:
    return [Question(**each | {"support": tuple(each["support"])}) for each in found]


@cache
def _read(name: str) -> dict[str, list[dict[str, Any]]]:
    parts: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return parts
