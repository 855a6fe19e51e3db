"""LongBench's JSON Lines, one file for each subtask (A3, experiment setup)."""

from __future__ import annotations

import re
from pathlib import Path

from cacheblend_lab.eval.datasets.records import Collector, Record, read_records
from cacheblend_lab.eval.datasets.subtasks import SUBTASKS
from cacheblend_lab.eval.metrics import ClassificationAccuracy, paragraph_number
from cacheblend_lab.eval.task import EvalQuestion, EvalTask
from cacheblend_rag.errors import DatasetError

__all__ = ["load_longbench"]


def load_longbench(path: Path, limit: int | None, subtask: str | None, whole: bool = False) -> EvalTask:
    """Load one subtask of LongBench, or of LongBench-E, whose names end in ``_e``: a file, or a folder of ``SUBTASK.jsonl``.

    The task is named ``longbench/SUBTASK``, without ``_e``, and says so if documents are `whole`: each one text, and all given,
    instead of being cut and searched. The subtask is the kind of every question too.
    """
    if subtask is not None and _plain(subtask) is None:
        raise DatasetError(f"LongBench's subtask {subtask!r} is unknown; {_known()}")
    if path.is_dir():
        if subtask is None:
            raise DatasetError(f"{path} is a folder; name a subtask (subtask=) or give one of its files; {_known()}")
        path = path / f"{subtask}.jsonl"
    wanted = None if subtask is None else _plain(subtask)
    classes: tuple[str, ...] | None = None
    found: Collector | None = None
    for record in read_records(path):
        name = _subtask_of(record)
        wanted = wanted or name
        if name != wanted:
            raise record.error(f"field 'dataset' says {name!r} where {wanted!r} is read; give each subtask alone")
        # Answers of two runs are told apart by the name.
        found = found or Collector(f"longbench/{wanted}{', whole documents' if whole else ''}", path, limit)
        if wanted == "trec":
            here = record.texts("all_classes")
            classes = classes or here
            if here != classes:
                raise record.error("field 'all_classes' differs from that of the records before")
        _take(found, record, wanted, whole)
        if found.full:
            break
    if found is None or wanted is None:
        raise DatasetError(f"{path} holds no question")
    task = SUBTASKS[wanted]
    return found.task(
        {"accuracy": ClassificationAccuracy(classes)} if classes else task.metrics,
        head=task.head,
        tail=task.tail,
        separator=task.separator,
        chunked=task.chunked or whole,
        max_new_tokens=task.max_new_tokens,
        extract=task.extract,
    )


def _take(found: Collector, record: Record, name: str, whole: bool) -> None:
    task = SUBTASKS[name]
    texts, question = task.texts(record.text("context"), record.text("input", blank=not task.asks), whole)
    answers = record.texts("answers")
    for index, answer in enumerate(answers):
        where = f"field 'answers[{index}]'"
        if name == "trec" and answer not in record.texts("all_classes"):
            raise record.error(f"{where} is {answer!r}, which is none of 'all_classes'")
        if name == "passage_count" and not re.fullmatch(r"\s*[0-9]+\s*", answer):
            raise record.error(f"{where} must be a number, and is {answer!r}")
        if name == "passage_retrieval_en" and not paragraph_number(answer):
            raise record.error(f"{where} must have the form 'Paragraph 7', and is {answer!r}")
    found.add(record, [EvalQuestion(record.name("_id"), question, answers, name)], texts)


def _subtask_of(record: Record) -> str:
    name = record.text("dataset")
    plain = _plain(name)
    if plain is None:
        language = f" (language {record.text('language')!r})" if record.has("language") else ""
        raise record.error(f"field 'dataset' says {name!r}{language}, an unknown subtask; {_known()}")
    return plain


def _plain(name: str) -> str | None:
    plain = name.removesuffix("_e")
    return plain if plain in SUBTASKS else None


def _known() -> str:
    return f"known are the English and code ones: {', '.join(SUBTASKS)}"
