"""SAMSum: a dialogue is to be summarised as examples before it are (CacheBlend, section 7.1)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from cacheblend_lab.eval.datasets.passages import passages_of
from cacheblend_lab.eval.datasets.records import Collector, Record, read_records
from cacheblend_lab.eval.datasets.texts import first_line, pack
from cacheblend_lab.eval.metrics import rouge_l
from cacheblend_lab.eval.task import EvalQuestion, EvalTask
from cacheblend_rag.errors import ConfigError, DatasetError

__all__ = ["EXAMPLES", "load_samsum"]

EXAMPLES = 16
"""Dialogues with their summaries that stand before each question."""

# The paper keeps chunks of 200 to 400 tokens; 400 tokens of English are about 1,600 characters.
_CHUNK_CHARS = 1600
_HEAD = "Below are dialogues, each followed by its summary in a few short sentences.\n\n"
_TAIL = "\n\nDialogue:\n{question}\nSummary:"


@dataclass(frozen=True, slots=True)
class _Pair:
    record: Record
    dialogue: str
    summary: str


def load_samsum(path: Path, limit: int | None, examples: Path | None) -> EvalTask:
    """Load SAMSum's records (id, dialogue, summary), records of ready passages (see `passages_of`), or a folder's ``test.json``.

    Every question gets `EXAMPLES` examples, or all if there are fewer, drawn by its id: the same in every run. They are
    packed into chunks of whole examples, and come from the file `examples`, by default the folder's training set, or the other
    records of the file itself. Records without a dialogue, of which the published training set is known to hold one, are left out
    and counted in the log.
    """
    if path.is_dir():
        path, examples = _split(path, "test"), examples or _split(path, "train")
    found = Collector("samsum", path, limit)
    records = list(read_records(path))
    if records and "ctxs" in records[0].fields:
        if examples is not None:
            raise ConfigError(
                f"examples={str(examples)!r} cannot be used: the records of {path} bring their own passages"
            )
        _take_passages(found, records)
    else:
        _take_pairs(found, records, examples)
    return found.task(
        {"rouge_l": rouge_l}, head=_HEAD, tail=_TAIL, chunked=True, max_new_tokens=128, extract=first_line
    )


def _take_passages(found: Collector, records: list[Record]) -> None:
    for record in records:
        if found.full:
            return
        dialogue = record.text("question").strip().removeprefix("Dialogue:").removesuffix("Summary:").strip()
        if not dialogue:
            raise record.error("field 'question' has no dialogue in it")
        question = EvalQuestion(f"samsum-{record.number}", dialogue, record.texts("answers"))
        found.add(record, [question], passages_of(record))


def _take_pairs(found: Collector, records: list[Record], examples: Path | None) -> None:
    pairs = _pairs(found, records, "a blank dialogue")
    pool = pairs if examples is None else _pairs(found, list(read_records(examples)), "a blank dialogue (examples)")
    if examples is not None and not pool:
        raise DatasetError(f"{examples} holds no dialogue; give a file with examples")
    if examples is None and len(pool) == 1:
        raise pool[0].record.error("a single dialogue leaves none for an example; give a file with examples")
    for index, pair in enumerate(pairs):
        if found.full:
            return
        name = pair.record.name("id")
        others = [each for each in range(len(pool)) if examples is not None or each != index]
        drawn = random.Random(f"samsum {name}").sample(others, min(EXAMPLES, len(others)))
        shown = [f"Dialogue:\n{pool[each].dialogue}\nSummary: {pool[each].summary}\n\n" for each in drawn]
        question = EvalQuestion(name, pair.dialogue, (pair.summary,))
        found.add(pair.record, [question], [chunk.strip() for chunk in pack(shown, _CHUNK_CHARS)])


def _pairs(found: Collector, records: list[Record], reason: str) -> list[_Pair]:
    pairs = []
    for record in records:
        if record.is_blank("dialogue"):
            found.leave_out(reason)
            continue
        dialogue = record.text("dialogue").replace("\r\n", "\n").strip()
        pairs.append(_Pair(record, dialogue, record.text("summary").strip()))
    return pairs


def _split(folder: Path, name: str) -> Path:
    for suffix in (".json", ".jsonl"):
        if (folder / f"{name}{suffix}").is_file():
            return folder / f"{name}{suffix}"
    raise DatasetError(f"{folder} has neither {name}.json nor {name}.jsonl; give the folder of SAMSum, or a file")
