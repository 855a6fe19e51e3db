"""The English and code subtasks of LongBench: how each is asked, cut, answered and judged."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cacheblend_lab.eval.datasets.texts import CHUNK_CHARS, code_line, first_line, pack, split_before
from cacheblend_lab.eval.metrics import (
    best_exact_match,
    best_f1,
    count_accuracy,
    edit_similarity,
    retrieval_accuracy,
    rouge_l,
)
from cacheblend_lab.eval.task import Metric

__all__ = ["LONGBENCH_SUBTASKS", "SUBTASKS", "Subtask"]

Texts = tuple[list[str], str]
"""The texts of a context and what is asked about them."""


@dataclass(frozen=True, slots=True)
class Subtask:
    """One subtask; what is not said here is as in `EvalTask`.

    Attributes
    ----------
    head, tail : str
        What stands before and after the chunks.
    max_new_tokens : int
        Most tokens of an answer, as LongBench sets it.
    metrics : mapping of str to Metric
        How answers are judged; empty where a metric needs the classes that only the records name.
    arrange : callable
        Makes texts and question of a record's fields ``context`` and ``input``.
    chunked : bool
        Whether those texts are all given, in order: where nothing is retrieved, since each part of the context counts.
    asks : bool
        Whether the field ``input`` must say something.
    document : re.Pattern, optional
        What each document of a context begins with, where `arrange` does not give documents.
    """

    head: str
    tail: str
    max_new_tokens: int
    metrics: Mapping[str, Metric]
    arrange: Callable[[str, str], Texts]
    chunked: bool = True
    asks: bool = True
    separator: str = "\n\n"
    extract: Callable[[str], str] = field(default=str.strip)
    document: re.Pattern[str] | None = None

    def texts(self, context: str, asked: str, whole: bool) -> Texts:
        """Return a context's texts and what is asked, or its whole documents in place of those texts."""
        texts, question = self.arrange(context, asked)
        if not whole or self.document is None:
            return texts, question
        return [text.strip() for text in split_before(self.document, context) if text.strip()], question


@dataclass(frozen=True, slots=True)
class _Parts:
    """All of a context in order, cut before whatever begins with the pattern: an example, a paragraph, a line."""

    pattern: re.Pattern[str]

    def __call__(self, context: str, asked: str) -> Texts:
        chunks = pack(split_before(self.pattern, context), CHUNK_CHARS)
        return [chunk.strip() for chunk in chunks if chunk.strip()], asked.strip()


def _document(context: str, asked: str) -> Texts:
    return [context.strip()], asked.strip()


def _code_before(context: str, asked: str) -> Texts:
    """Ask with the last lines, at most a quarter of the code; the code itself is kept to the character."""
    code = context + asked
    last = len(code) - min(len(code) // 4, _LAST_CODE_CHARS)
    line = code.find("\n", last - 1) + 1
    border = line if last <= line < len(code) else last
    chunks = pack(code[:border].splitlines(keepends=True), _CODE_CHUNK_CHARS)
    return [chunk for chunk in chunks if chunk.strip()], code[border:]


def _code_across(context: str, asked: str) -> Texts:
    return [context], asked


_LAST_CODE_CHARS = 600
# Code has more tokens to a character than prose: this is about 512 of them.
_CODE_CHUNK_CHARS = 1536

_LINES = _Parts(re.compile(r"^", re.MULTILINE))
_PARAGRAPHS = re.compile(r"^Paragraph [0-9]+:", re.MULTILINE)
_NUMBERED = re.compile(r"^Passage \d+:", re.MULTILINE)
_F1: Mapping[str, Metric] = {"f1": best_f1, "exact_match": best_exact_match}
_ROUGE: Mapping[str, Metric] = {"rouge_l": rouge_l}
_EDITS: Mapping[str, Metric] = {"edit_similarity": edit_similarity}

_PASSAGES = Subtask(
    "Here are several passages.\n\n",
    "\n\nUse the passages to answer this question. Reply with the answer alone.\n\nQuestion: {question}\nAnswer:",
    32,
    _F1,
    _document,
    chunked=False,
    document=_NUMBERED,
)

SUBTASKS: Mapping[str, Subtask] = {
    "narrativeqa": Subtask(
        "Here is a story, from a book or a film script.\n\n",
        "\n\nAnswer this question about the story in as few words as you can, best in one phrase, without explaining.\n\n"
        "Question: {question}\nAnswer:",
        128,
        _F1,
        _document,
        chunked=False,
    ),
    "qasper": Subtask(
        "Here is a research paper.\n\n",
        "\n\nAnswer this question about the paper in one phrase or sentence, without explaining. Reply yes or no where that is "
        "what is asked, and unanswerable where the paper does not say.\n\nQuestion: {question}\nAnswer:",
        128,
        _F1,
        _document,
        chunked=False,
    ),
    "multifieldqa_en": Subtask(
        "Here is a text.\n\n",
        "\n\nAnswer this question from the text, briefly. Reply with the answer alone.\n\nQuestion: {question}\nAnswer:",
        64,
        _F1,
        _document,
        chunked=False,
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "gov_report": Subtask(
        "Here is a report by a government agency.\n\n",
        "\n\nSummarise the report on one page.\n\nSummary:",
        512,
        _ROUGE,
        _LINES,
        asks=False,
        document=re.compile(r"\A"),
    ),
    "qmsum": Subtask(
        "Here is the transcript of a meeting.\n\n",
        "\n\nReply to this request about the meeting in one or a few sentences.\n\nRequest: {question}\nReply:",
        512,
        _ROUGE,
        _document,
        chunked=False,
    ),
    "multi_news": Subtask(
        "Here are several news articles.\n\n",
        "\n\nSummarise all of the news on one page.\n\nSummary:",
        512,
        _ROUGE,
        _LINES,
        asks=False,
        document=_NUMBERED,
    ),
    "trec": Subtask(
        "Say of what type the last question is. These are examples of questions and their types.\n\n",
        "\n\n{question}",
        64,
        {},
        _Parts(re.compile(r"^Question:", re.MULTILINE)),
        extract=first_line,
    ),
    "triviaqa": Subtask(
        "Answer the last question from the passage before it. Reply with the answer alone. First come examples.\n\n",
        "\n\n{question}",
        32,
        _F1,
        _Parts(re.compile(r"^Passage:", re.MULTILINE)),
        extract=first_line,
    ),
    "samsum": Subtask(
        "Put the last dialogue into a few short sentences. First come examples.\n\n",
        "\n\n{question}",
        128,
        _ROUGE,
        _Parts(re.compile(r"^Dialogue:", re.MULTILINE)),
        extract=first_line,
    ),
    "passage_count": Subtask(
        "Here are numbered paragraphs, some of which are the same as others.\n\n",
        "\n\nCount the paragraphs, taking those that are the same for one. Reply with the number alone.\n\nNumber:",
        32,
        {"count_accuracy": count_accuracy},
        _Parts(_PARAGRAPHS),
        asks=False,
        document=_PARAGRAPHS,
    ),
    "passage_retrieval_en": Subtask(
        "Here are numbered paragraphs.\n\n",
        "\n\nHere is the abstract of one of them.\n\n{question}\n\n"
        "Which paragraph is it? Reply in the form Paragraph 1.\n\nReply:",
        32,
        {"retrieval_accuracy": retrieval_accuracy},
        _Parts(_PARAGRAPHS),
        document=_PARAGRAPHS,
    ),
    "lcc": Subtask(
        "Go on with this code.\n",
        "{question}The next line is:\n",
        64,
        _EDITS,
        _code_before,
        asks=False,
        separator="",
        extract=code_line,
    ),
    "repobench-p": Subtask(
        "Go on with the last of this code, of which other parts come first.\n",
        "\n{question}The next line is:\n",
        64,
        _EDITS,
        _code_across,
        chunked=False,
        separator="\n",
        extract=code_line,
    ),
}
"""The subtasks by the name that LongBench gives them."""

LONGBENCH_SUBTASKS = tuple(SUBTASKS)
"""The names of LongBench's English and code subtasks."""
