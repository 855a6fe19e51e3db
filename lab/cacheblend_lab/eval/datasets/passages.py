"""Questions over passages: MuSiQue, HotpotQA and 2WikiMultihopQA (CacheBlend, section 7.1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cacheblend_lab.eval.datasets.records import Collector, Record, read_records
from cacheblend_lab.eval.datasets.texts import first_line
from cacheblend_lab.eval.metrics import best_exact_match, best_f1
from cacheblend_lab.eval.task import EvalQuestion, EvalTask

__all__ = ["load_musique", "load_wikimqa", "passages_of"]

_HEAD = "Below are passages. Read them, then answer a question from what they say.\n\n"
_TAIL = "\n\nAnswer the question from the passages above. Answer within 5 words.\n\nQuestion: {question}\nAnswer:"  # footnote 7


def load_musique(path: Path, limit: int | None) -> EvalTask:
    """Load MuSiQue's JSON Lines, or records of ready passages (see `passages_of`).

    Records whose field ``answerable`` is false have no right answer; they are left out, and counted in the log.
    """

    def read(found: Collector, record: Record) -> None:
        if not record.flag("answerable", default=True):
            found.leave_out("answerable false")
            return
        name = record.name("id")
        texts = [
            _passage(each.text("title", blank=True), each.text("paragraph_text"))
            for each in record.children("paragraphs")
        ]
        answers = (record.text("answer"), *record.texts("answer_aliases", empty=True))
        # An id begins with the kind of reasoning: 2hop__, 3hop1__, 3hop2__ and so on.
        hops, mark, _ = name.partition("__")
        question = EvalQuestion(name, record.text("question").strip(), _distinct(answers), hops if mark else "all")
        found.add(record, [question], texts)

    return _load("musique", path, limit, read)


def load_wikimqa(path: Path, limit: int | None) -> EvalTask:
    """Load the JSON list of 2WikiMultihopQA, which is HotpotQA's too, or records of ready passages (see `passages_of`)."""

    def read(found: Collector, record: Record) -> None:
        texts = [_titled(record, index, each) for index, each in enumerate(record.list("context"))]
        question = EvalQuestion(
            record.name("_id"),
            record.text("question").strip(),
            (record.text("answer"),),
            record.text("type") if record.has("type") else "all",
        )
        found.add(record, [question], texts)

    return _load("2wikimqa", path, limit, read)


def passages_of(record: Record) -> list[str]:
    """Return the passages of a record of the form ``{"ctxs": [{"title", "text"}], "question", "answers"}``.

    CacheBlend's authors publish their inputs in this form. Each passage is a document of its own, mostly of 512 tokens.
    """
    return [
        _passage(each.text("title", blank=True) if each.has("title") else "", each.text("text"))
        for each in record.children("ctxs")
    ]


def _load(name: str, path: Path, limit: int | None, read: Callable[[Collector, Record], None]) -> EvalTask:
    found = Collector(name, path, limit)
    for record in read_records(path):
        if found.full:
            break
        if "ctxs" in record.fields:
            question = EvalQuestion(f"{name}-{record.number}", record.text("question").strip(), record.texts("answers"))
            found.add(record, [question], passages_of(record))
        else:
            read(found, record)
    metrics = {"f1": best_f1, "exact_match": best_exact_match}
    return found.task(metrics, head=_HEAD, tail=_TAIL, chat=True, extract=first_line)


def _titled(record: Record, index: int, value: object) -> str:
    where = f"context[{index}]"
    if not isinstance(value, list) or len(value) != 2:
        raise record.error(f"field {record.prefix + where!r} must be [title, [sentences]]")
    passage = record.within(where, {"title": value[0], "sentences": value[1]})
    sentences = " ".join(each.strip() for each in passage.texts("sentences", blank=True, empty=True))
    text = _passage(passage.text("title", blank=True), sentences)
    if not text:
        raise record.error(f"field {record.prefix + where!r} has neither a title nor a sentence")
    return text


def _passage(title: str, text: str) -> str:
    return f"{title.strip()}\n{text.strip()}".strip()


def _distinct(answers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answers))
