"""The records of a data set file, JSON or JSON Lines, and the task that comes of them; whatever is wrong names file, record, line
and field.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from cacheblend_lab.eval.task import EvalContext, EvalQuestion, EvalTask, Metric
from cacheblend_rag.errors import DatasetError

__all__ = ["Collector", "Record", "read_records", "read_text"]

_SPACE = re.compile(r"[ \t\r\n]*")
_NAMES = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}


@dataclass(frozen=True, slots=True)
class Record:
    """One record, or an object within one.

    The number and the line on which it begins are counted from 1; `prefix` stands before the names of its fields in messages, for
    an object within a record.
    """

    path: Path
    number: int
    line: int
    fields: Mapping[str, object]
    prefix: str = ""

    def error(self, problem: str) -> DatasetError:
        """Return the error that says where this record stands."""
        return DatasetError(f"{self.path}, record {self.number} (line {self.line}): {problem}")

    def has(self, field: str) -> bool:
        """Return whether a field is there and not null."""
        return self.fields.get(field) is not None

    def is_blank(self, field: str) -> bool:
        """Return whether a field is there, and is null or a text without anything to read."""
        value = self._get(field)
        return value is None or (isinstance(value, str) and not value.strip())

    def text(self, field: str, *, blank: bool = False) -> str:
        """Return a field that is a text; only with `blank` may it be empty or white space."""
        return self._as_text(field, self._get(field), blank)

    def name(self, field: str) -> str:
        """Return a field that is an id: a text or a whole number."""
        value = self._get(field)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return self._as_text(field, value, blank=False)

    def texts(self, field: str, *, blank: bool = False, empty: bool = False) -> tuple[str, ...]:
        """Return a field that is a list of texts; only with `empty` may the list have none, and be missing or null."""
        if empty and not self.has(field):
            return ()
        return tuple(
            self._as_text(f"{field}[{index}]", each, blank) for index, each in enumerate(self.list(field, empty=empty))
        )

    def within(self, where: str, fields: Mapping[str, object]) -> Record:
        """Return an object within this record; `where` is how messages name it."""
        return Record(self.path, self.number, self.line, fields, f"{self.prefix}{where}.")

    def children(self, field: str) -> tuple[Record, ...]:
        """Return a field that is a list of one or more objects."""
        found = []
        for index, each in enumerate(self.list(field)):
            where = f"{field}[{index}]"
            if not isinstance(each, dict):
                raise self._wrong(where, each, "an object")
            found.append(self.within(where, each))
        return tuple(found)

    def list(self, field: str, *, empty: bool = False) -> list[object]:
        """Return a field that is a list; only with `empty` may it have nothing in it."""
        value = self._get(field)
        if not isinstance(value, list):
            raise self._wrong(field, value, "a list")
        if not value and not empty:
            raise self.error(f"field {self.prefix + field!r} is an empty list")
        return value

    def flag(self, field: str, default: bool) -> bool:
        """Return a field that is true or false, or the default if it is missing or null."""
        value = self.fields.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(field, value, "true or false")
        return value

    def _get(self, field: str) -> object:
        if field not in self.fields:
            there = ", ".join(sorted(repr(each) for each in self.fields)[:12]) or "none"
            raise self.error(f"field {self.prefix + field!r} is missing (fields there: {_short(there)})")
        return self.fields[field]

    def _as_text(self, field: str, value: object, blank: bool) -> str:
        if not isinstance(value, str):
            raise self._wrong(field, value, "a text")
        if not blank and not value.strip():
            raise self.error(f"field {self.prefix + field!r} is empty")
        try:
            value.encode()
        except UnicodeEncodeError:
            # "\ud800" is valid JSON, but no text: it could neither be tokenised nor written down again.
            raise self.error(f"field {self.prefix + field!r} holds half of a surrogate pair") from None
        return value

    def _wrong(self, field: str, value: object, wanted: str) -> DatasetError:
        kind = "null" if value is None else _NAMES[type(value)]
        return self.error(f"field {self.prefix + field!r} must be {wanted}, and is {kind}: {_short(repr(value))}")


def read_text(path: Path) -> str:
    """Return a file's text, which must be UTF-8; a byte order mark is left out."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be read ({error}); give a file of the data set") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DatasetError(f"{path} is not UTF-8 (line {line}, byte {error.start}); convert it to UTF-8") from error


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a JSON file, which is one list of objects, or of a JSON Lines file with an object on each line.

    What stands after the records that are taken is not looked at.
    """
    text = read_text(path)
    start = _skip(text, 0)
    records = _of_list(path, text, start) if text[start : start + 1] == "[" else _of_lines(path, text)
    for number, (line, value) in enumerate(records, start=1):
        if not isinstance(value, dict):
            raise DatasetError(
                f"{path}, record {number} (line {line}): must be an object with named fields: {_short(repr(value))}"
            )
        yield Record(path, number, line, cast("dict[str, object]", value))


def _of_lines(path: Path, text: str) -> Iterator[tuple[int, object]]:
    # Not splitlines(): a JSON text may hold U+2028 and its like as they are.
    for line, row in enumerate(text.split("\n"), start=1):
        if row.strip():
            value, end = _decode(path, row, _skip(row, 0), line)
            if _skip(row, end) != len(row):
                raise DatasetError(
                    f"{path}, line {line}: more follows after the record's end; JSON Lines have one a line"
                )
            yield line, value


def _of_list(path: Path, text: str, start: int) -> Iterator[tuple[int, object]]:
    line, counted = 1, 0
    at = _skip(text, start + 1)
    ended = text[at : at + 1] == "]"
    while not ended:
        line, counted = line + text.count("\n", counted, at), at
        value, end = _decode(path, text, at, 1)
        yield line, value
        at = _skip(text, end)
        if text[at : at + 1] not in (",", "]"):
            raise _not_json(path, text.count("\n", 0, at) + 1, "a comma or the end of the list is missing")
        ended = text[at] == "]"
        at = at if ended else _skip(text, at + 1)
    rest = _skip(text, at + 1)
    if rest != len(text):
        raise _not_json(path, text.count("\n", 0, rest) + 1, "more follows after the list's end")


def _decode(path: Path, text: str, at: int, first_line: int) -> tuple[object, int]:
    try:
        value, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise _not_json(path, first_line + error.lineno - 1, f"{error.msg}, column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise _not_json(path, first_line + text.count("\n", 0, at), str(error)) from error
    return value, end


_DECODER = json.JSONDecoder()


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _not_json(path: Path, line: int, problem: str) -> DatasetError:
    return DatasetError(
        f"{path}, line {line}: not JSON ({problem}); the file must be one list of records, or JSON Lines"
    )


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"


logger = logging.getLogger(__name__)


class Collector:
    """Takes questions until there are enough, sees that their ids differ, and counts the records that are left out."""

    def __init__(self, name: str, path: Path, limit: int | None) -> None:
        self._name = name
        self._path = path
        self._limit = limit
        self._contexts: list[EvalContext] = []
        self._numbers: dict[str, int] = {}
        self._left_out: Counter[str] = Counter()

    @property
    def full(self) -> bool:
        """Whether there are as many questions as wanted."""
        return self._limit is not None and len(self._numbers) >= self._limit

    def add(
        self, record: Record, questions: Sequence[EvalQuestion], texts: Sequence[str], documents: Sequence[int] = ()
    ) -> None:
        """Take a record's questions, as far as they are wanted; `texts` and `documents` are those of `EvalContext`."""
        if not texts:
            raise record.error("there is no text to answer from")
        taken: list[EvalQuestion] = []
        for question in questions:
            if self.full:
                break
            if question.id in self._numbers:
                raise record.error(f"the id {question.id!r} is that of record {self._numbers[question.id]} too")
            if question.chunks and max(question.chunks) >= len(texts):
                raise record.error(f"question {question.id!r} names chunk {max(question.chunks)} of {len(texts)}")
            self._numbers[question.id] = record.number
            taken.append(question)
        self._contexts.append(EvalContext(tuple(texts), tuple(taken), tuple(documents)))

    def leave_out(self, reason: str) -> None:
        """Count a record that its format itself calls unusable, or is known to hold."""
        self._left_out[reason] += 1

    def task(self, metrics: Mapping[str, Metric], **frame: Any) -> EvalTask:
        """Return the task, and log how many records were left out and why; `frame` are other attributes of `EvalTask`."""
        said = "; ".join(f"{count} with {reason}" for reason, count in self._left_out.items())
        if not self._contexts:
            raise DatasetError(f"{self._path} holds no question" + (f" (left out: {said})" if said else ""))
        if said:
            logger.warning("%s: %d questions; records left out: %s", self._path, len(self._numbers), said)
        for metric in metrics.values():
            # A package that is missing is said now, and not after the first answer.
            metric("probe", ("probe",))
        return EvalTask(self._name, tuple(self._contexts), metrics, **frame)
