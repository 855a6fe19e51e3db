"""Questions about documents of one's own, as JSON Lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cacheblend_lab.eval.datasets.records import Collector, Record, read_records
from cacheblend_lab.eval.metrics import best_exact_match, best_f1, holds_one
from cacheblend_lab.eval.task import EvalQuestion, EvalTask

__all__ = ["load_qa"]

_HEAD = "Answer the question from the context only, in a few words.\n\nContext:\n"
_TAIL = "\n\nQuestion: {question}\nAnswer:"


def load_qa(path: Path, limit: int | None) -> EvalTask:
    """Load questions about documents.

    A record is an object ``{"documents": [...], "questions": [{"question": "...", "answers": ["..."]}]}``; a question may have an
    ``id`` and a ``kind``. Each document is a text, which is cut into chunks that are retrieved, or a list of texts, which are its
    chunks: a question is then answered from all of them in order, or from those that its ``chunks`` name, by their numbers
    through all documents of the record, from 0. L-Eval's ``{"input", "instructions", "outputs"}`` is taken as well.
    """
    found = Collector("qa", path, limit)
    chunked: bool | None = None
    for record in read_records(path):
        if found.full:
            break
        documents = [(record.text("input"),)] if record.has("input") else _documents(record)
        is_cut = not record.has("input") and isinstance(record.list("documents")[0], list)
        if chunked is not None and is_cut != chunked:
            raise record.error("its documents are lists of chunks and those before are texts, or the other way round")
        chunked = is_cut
        questions = list(_leval(record) if record.has("instructions") else _questions(record))
        pieces = [piece for document in documents for piece in document]
        lengths = tuple(len(document) for document in documents)
        found.add(record, questions, pieces, lengths if chunked else ())
    metrics = {"holds_answer": holds_one, "f1": best_f1, "exact_match": best_exact_match}
    return found.task(metrics, head=_HEAD, tail=_TAIL, chat=True, chunked=bool(chunked), max_new_tokens=24)


def _documents(record: Record) -> list[tuple[str, ...]]:
    if isinstance(record.list("documents")[0], list):
        parts = [record.within("documents", {str(n): each}) for n, each in enumerate(record.list("documents"))]
        return [part.texts(str(number)) for number, part in enumerate(parts)]
    return [(text,) for text in record.texts("documents")]


def _questions(record: Record) -> Iterator[EvalQuestion]:
    for number, each in enumerate(record.children("questions")):
        chunks = each.list("chunks") if each.has("chunks") else None
        if chunks is not None and not all(type(chunk) is int and chunk >= 0 for chunk in chunks):
            raise each.error(f"field {each.prefix + 'chunks'!r} must be a list of numbers from 0")
        yield EvalQuestion(
            each.name("id") if each.has("id") else f"{record.number}-{number}",
            each.text("question").strip(),
            each.texts("answers"),
            each.text("kind") if each.has("kind") else "all",
            None if chunks is None else tuple(int(str(chunk)) for chunk in chunks),
        )


def _leval(record: Record) -> Iterator[EvalQuestion]:
    questions, answers = record.texts("instructions"), record.texts("outputs")
    if len(questions) != len(answers):
        raise record.error(f"there are {len(questions)} instructions and {len(answers)} outputs")
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        yield EvalQuestion(f"{record.number}-{number}", question.strip(), (answer.strip(),))
