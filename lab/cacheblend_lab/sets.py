"""Questions over documents, from a file of one's own or of a public data set: `read_set`.

A file is one list in JSON, or JSON Lines. Which data set it is of is seen by its fields; docs/evaluation.md lists them. Nothing
is downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AliasChoices, BaseModel, Field, StringConstraints, ValidationError

from cacheblend_attachments.answers import f1_score, holds_answer
from cacheblend_rag.errors import ConfigError

__all__ = ["Question", "QuestionSet", "Score", "f1", "holds", "read_set", "rouge_l"]

Score = Callable[[str, Sequence[str]], float]
"""How good an answer is, from 0 to 1, given the right ones: as good as by the one that it is nearest to."""

_HEAD = "Answer the question from the context only, in a few words.\n\n"
_TAIL = "Question: {}"


def f1(answer: str, answers: Sequence[str]) -> float:
    """Return the F1 over words in lower case without punctuation and articles, as SQuAD defines it."""
    return max(f1_score(answer, each) for each in answers)


def holds(answer: str, answers: Sequence[str]) -> float:
    """Return 1 if the words of a right answer stand in the answer, else 0."""
    return float(any(holds_answer(answer, each) for each in answers))


def rouge_l(answer: str, answers: Sequence[str]) -> float:
    """Return the F-measure of Rouge-L with Porter stemming, by the package rouge-score."""
    return max(float(_scorer().score(each, answer)["rougeL"].fmeasure) for each in answers)


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)


@dataclass(frozen=True)
class Question:
    """What is asked, its right answers, and the numbers of the documents that it is asked about, where they are numbered."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...] = ()

    def is_answered_by(self, answer: str) -> bool:
        """Whether an answer holds a right one."""
        return any(holds_answer(answer, each) or each in answer for each in self.answers)


@dataclass(frozen=True)
class QuestionSet:
    """Documents, what is asked about them, and how.

    Attributes
    ----------
    documents : sequence of str
        Texts, each to be cut into chunks.
    questions : sequence of Question
        The questions.
    head, tail : str
        What a prompt says before its chunks and behind them, the question in the place of ``{}``.
    score : callable
        How answers are judged.
    """

    documents: Sequence[str]
    questions: Sequence[Question]
    head: str = _HEAD
    tail: str = _TAIL
    score: Score = f1


class _Manner(NamedTuple):
    """How questions of a data set are asked and judged."""

    head: str = _HEAD
    tail: str = _TAIL
    score: Score = f1


_Said = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
_Some = Field(min_length=1)
_Answers = Annotated[tuple[_Said, ...], _Some]
_Parts = tuple[list[str], list[tuple[str, tuple[str, ...]]]]


class _Record(BaseModel):
    """A record, whose fields are those of its data set; others are left alone."""

    manner: ClassVar[_Manner] = _Manner()
    behind: ClassVar[int] = 0
    """How many documents before its own its questions are asked about, instead of its own."""

    def asked(self) -> _Manner:
        """Return how questions like this one are asked."""
        return self.manner

    def parts(self) -> _Parts:
        """Return its documents, and its questions with their right answers."""
        raise NotImplementedError


class _Pair(BaseModel):
    question: _Said
    answers: _Answers


class _Own(_Record):
    """Questions about documents of one's own."""

    manner = _Manner(score=holds)
    documents: Annotated[list[_Said], _Some]
    questions: list[_Pair]

    def parts(self) -> _Parts:
        return self.documents, [(each.question, each.answers) for each in self.questions]


class _LEval(_Record):
    """A document of L-Eval, without its markup."""

    manner = _Manner(score=holds)
    input: _Said
    instructions: list[_Said]
    outputs: list[_Said]

    def parts(self) -> _Parts:
        text = re.sub(r"(<[^>]+>|\s)+", " ", self.input).strip()
        return [text], [(asked, (answer,)) for asked, answer in zip(self.instructions, self.outputs, strict=True)]


class _Passage(BaseModel):
    title: str = ""
    text: Annotated[str, Field(validation_alias=AliasChoices("text", "paragraph_text"))]

    def __str__(self) -> str:
        return f"{self.title}\n{self.text}".strip()


class _Passages(_Record):
    """A question over passages, as CacheBlend's authors publish their inputs."""

    ctxs: Annotated[list[_Passage], _Some]
    question: _Said
    answers: _Answers

    def parts(self) -> _Parts:
        return list(map(str, self.ctxs)), [(self.question, self.answers)]


class _MuSiQue(_Record):
    """A question of MuSiQue over its paragraphs; one that has no answer is left out."""

    paragraphs: Annotated[list[_Passage], _Some]
    question: _Said
    answer: _Said
    answer_aliases: tuple[_Said, ...] = ()
    answerable: bool = True

    def parts(self) -> _Parts:
        pair = self.question, (self.answer, *self.answer_aliases)
        return (list(map(str, self.paragraphs)), [pair]) if self.answerable else ([], [])


class _HotpotQA(_Record):
    """A question of HotpotQA or 2WikiMultihopQA over its passages."""

    context: Annotated[list[tuple[str, list[str]]], _Some]
    question: _Said
    answer: _Said

    def parts(self) -> _Parts:
        texts = [f"{title}\n{' '.join(map(str.strip, sentences))}".strip() for title, sentences in self.context]
        return texts, [(self.question, (self.answer,))]


class _SAMSum(_Record):
    """A dialogue of SAMSum, asked about behind others with their summaries."""

    manner = _Manner("Summarise the last dialogue as the examples do.\n\n", "{}\nSummary:", rouge_l)
    behind = 16
    dialogue: _Said
    summary: _Said

    def parts(self) -> _Parts:
        return [f"{self.dialogue}\nSummary: {self.summary}"], [(self.dialogue, (self.summary,))]


class _MultiNews(_Record):
    """Articles of MultiNews on one event."""

    manner = _Manner("Read these news articles.\n\n", "Write one summary of all of the articles.{}", rouge_l)
    document: _Said
    summary: _Said

    def parts(self) -> _Parts:
        articles = self.document.replace("NEWLINE_CHAR", "\n").split("|||||")
        return [text.strip() for text in articles if text.strip()], [("", (self.summary,))]


_SUMMARY = _Manner("Read this text.\n\n", "Summarise the text.{}", rouge_l)
_LONGBENCH = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"), _Manner()),
    **dict.fromkeys(("gov_report", "multi_news"), _SUMMARY),
    "qmsum": _Manner("Read this transcript of a meeting.\n\n", "Reply to this request: {}", rouge_l),
    "trec": _Manner("Say the type of the last question as the examples do.\n\n", "{}", holds),
    "triviaqa": _Manner("Answer the last question as the examples do.\n\n", "{}"),
    "samsum": _Manner("Summarise the last dialogue as the examples do.\n\n", "{}", rouge_l),
}


class _LongBench(_Record):
    """A record of LongBench, or of LongBench-E."""

    dataset: str
    context: _Said
    input: str
    answers: _Answers

    def asked(self) -> _Manner:
        name = self.dataset.removesuffix("_e")
        if name not in _LONGBENCH:
            raise ValueError(f"LongBench's subtask {name!r} is not read here; these are: {', '.join(_LONGBENCH)}")
        return _LONGBENCH[name]

    def parts(self) -> _Parts:
        return [self.context], [(self.input.strip(), self.answers)]


_KINDS: Sequence[type[_Record]] = (_Own, _LEval, _Passages, _MuSiQue, _LongBench, _HotpotQA, _SAMSum, _MultiNews)


def read_set(path: Path) -> QuestionSet:
    """Read a file of questions over documents.

    Raises
    ------
    ConfigError
        If it cannot be read or holds no question, or a record is of none of the data sets, or of another than the first; the
        message says which and why.
    """
    documents: list[str] = []
    questions: list[Question] = []
    manner: _Manner | None = None
    for number, record in enumerate(_records(path), 1):
        kind = next((each for each in _KINDS if _names(each) <= record.keys()), None)
        if kind is None:
            raise ConfigError(f"{path}, record {number}: the fields {sorted(record)} are of no data set known here")
        try:
            read = kind.model_validate(record)
            texts, asked = read.parts()
            if (manner := manner or read.asked()) is not read.asked():
                raise ValueError("it is of another data set than those before it; give each a file of its own")
        except ValidationError as error:
            found = error.errors(include_url=False)[0]
            where = ".".join(map(str, found["loc"]))
            raise ConfigError(f"{path}, record {number}, field {where}: {found['msg']}") from error
        except ValueError as error:
            raise ConfigError(f"{path}, record {number}: {error}") from error
        first = len(documents)
        documents += texts
        own = range(max(0, first - kind.behind), first) if kind.behind else range(first, len(documents))
        questions += [Question(text, answers, tuple(own)) for text, answers in asked if own]
    if manner is None or not questions:
        raise ConfigError(f"{path} holds no question")
    return QuestionSet(documents, questions, *manner)


def _names(kind: type[_Record]) -> set[str]:
    """Return the fields by which records of a data set are known."""
    return {name for name, field in kind.model_fields.items() if field.is_required()}


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        # Not splitlines(): texts hold U+2028 and its like.
        lines = [line for line in text.split("\n") if line.strip()]
        found = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON or JSON Lines: {error}") from error
    if not all(isinstance(each, dict) for each in found):
        raise ConfigError(f"{path} holds something else than records, which are objects in JSON")
    return list(found)
