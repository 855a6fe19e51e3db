"""MultiNews: several articles on one event are to be summarised (CacheBlend, section 7.1)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from cacheblend_lab.eval.datasets.records import Collector, Record, read_records, read_text
from cacheblend_lab.eval.datasets.texts import CHUNK_CHARS, cut
from cacheblend_lab.eval.metrics import rouge_l
from cacheblend_lab.eval.task import EvalQuestion, EvalTask
from cacheblend_rag.errors import DatasetError

__all__ = ["load_multinews"]

# The cleaned release has the bars, the first one the words.
_BETWEEN_ARTICLES = re.compile(r"\|\|\|\|\||story_separator_special_tag")
_NEWLINE = "NEWLINE_CHAR"
_HEAD = "Below are news articles about one event.\n\n"
_TAIL = "\n\nWrite one summary of all the articles above.\n\nSummary:"


def load_multinews(path: Path, limit: int | None) -> EvalTask:
    """Load MultiNews, from its ``.src`` file with the ``.tgt`` file beside it, or from records (document, summary).

    There is no question, so nothing is retrieved: all chunks are given, in order. An article is cut into chunks of about 512
    tokens (`CHUNK_CHARS`), and no chunk holds two articles. Records without an article are left out and counted in the log.
    """
    found = Collector("multinews", path, limit)
    for source, target in _pairs(path):
        if found.full:
            break
        document = "" if source.is_blank("document") else source.text("document").replace(_NEWLINE, "\n")
        articles = [each.strip() for each in _BETWEEN_ARTICLES.split(document) if each.strip()]
        if not articles:
            found.leave_out("no article")
            continue
        chunks = [chunk.strip() for article in articles for chunk in cut(article, CHUNK_CHARS) if chunk.strip()]
        summary = target.text("summary").replace(_NEWLINE, "\n").strip()
        found.add(source, [EvalQuestion(f"multinews-{source.number}", "", (summary,))], chunks)
    return found.task({"rouge_l": rouge_l}, head=_HEAD, tail=_TAIL, chunked=True, max_new_tokens=512)


def _pairs(path: Path) -> Iterator[tuple[Record, Record]]:
    if path.suffix in (".json", ".jsonl"):
        for record in read_records(path):
            yield record, record
        return
    target = _target_of(path)
    documents, summaries = _lines(path), _lines(target)
    if len(documents) != len(summaries):
        raise DatasetError(
            f"{path} has {len(documents)} lines and {target} {len(summaries)}; each line of one belongs to that of the other"
        )
    for number, (document, summary) in enumerate(zip(documents, summaries, strict=True), start=1):
        yield (
            Record(path, number, number, {"document": document}),
            Record(target, number, number, {"summary": summary}),
        )


def _target_of(source: Path) -> Path:
    stem, mark, rest = source.name.rpartition(".src")
    if not mark:
        raise DatasetError(
            f"{source} is neither a .src file of MultiNews nor .json nor .jsonl; give one of these, for instance val.src.cleaned"
        )
    names = dict.fromkeys([f"{stem}.tgt", f"{stem}.tgt{rest}"])
    for name in names:
        if source.with_name(name).is_file():
            return source.with_name(name)
    raise DatasetError(f"{source} has no summaries beside it: {' or '.join(names)} is missing")


def _lines(path: Path) -> list[str]:
    # Not splitlines(): articles hold U+2028 and its like.
    lines = [line.rstrip("\r") for line in read_text(path).split("\n")]
    return lines[:-1] if lines[-1] == "" else lines
