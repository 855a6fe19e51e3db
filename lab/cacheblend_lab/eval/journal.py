"""The answers of an evaluation as they come, in a file that an interrupted run goes on from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from cacheblend_rag.errors import ConfigError

__all__ = ["Answer", "Asked", "Journal", "parse_asked"]

_VERSION = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """One method's answer to one question.

    Attributes
    ----------
    text : str
        What the model wrote.
    charged_ratio : float or None
        Work done on chunk tokens over (chunk tokens x layers); None where the method has no such figure.
    recompute_ratio : float or None
        The ratio asked for, or found for a charge.
    ttft_s : float or None
        Seconds to the first token of the answer; None where several questions were answered in one batch.
    output_tokens : int
        Tokens of the answer, an end token included.
    loss, first_loss : float or None
        Mean negative log-probability of the right answer's tokens, and that of the first of them, in nats; None where they were
        not asked for.
    first_token : int or None
        The token that the model finds most likely to be the first one.
    """

    text: str
    charged_ratio: float | None
    recompute_ratio: float | None
    ttft_s: float | None
    output_tokens: int
    loss: float | None = None
    first_loss: float | None = None
    first_token: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """One question, asked by every method.

    Attributes
    ----------
    question : str
        Its id.
    answers : dict of str to (Answer or None)
        By the method's name; None where the method cannot be as cheap as it was asked to be.
    skipped : str or None
        Why it was not asked at all, if it was not.
    """

    question: str
    answers: dict[str, Answer | None] = field(default_factory=dict)
    skipped: str | None = None


class Journal:
    """A JSON-lines file: a header that pins what is evaluated, then one line for each question with all its answers.

    A context manager. A line is written when all methods have answered; a torn or damaged line is dropped and its question asked
    again.

    Attributes
    ----------
    asked : dict of str to Asked
        What the file held, by question.
    damaged : int
        How many lines could not be read.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        *,
        expected: Callable[[Asked], bool] = lambda _: True,
        fresh: bool = False,
    ) -> None:
        self.path = path
        self._expected = expected
        self.asked: dict[str, Asked] = {}
        self.damaged = 0
        self._header = {"journal": _VERSION} | json.loads(json.dumps(header))
        self._file: IO[bytes] | None = None
        try:
            held = b"" if fresh or not path.exists() else path.read_bytes()
            kept = self._read(held)
            if kept != held or not held:
                # Whole or not at all, so that a run that ends here loses no answer.
                waiting = path.with_name(f"{path.name}.new")
                waiting.write_bytes(kept)
                os.replace(waiting, path)
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(f"{path}, which answers are kept in, cannot be used: {error.strerror}") from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, asked: Asked) -> None:
        """Write the answers to one question."""
        assert self._file is not None
        self.asked[asked.question] = asked
        try:
            self._file.write(_line(asdict(asked)))
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"{self.path}, which answers are kept in, cannot be written: {error.strerror}") from error

    def _read(self, held: bytes) -> bytes:
        """Take in what a file held; return what is to stay of it."""
        first, end, rest = held.partition(b"\n")
        if not end:
            if first and not _line(self._header).startswith(first):
                raise ConfigError(f"{self.path} is not a journal of an evaluation; name another file, or use --fresh")
            return _line(self._header)
        self._check_header(first)
        kept = [first + end]
        *lines, torn = rest.split(b"\n")
        self.damaged += bool(torn)
        for line in lines:
            asked = parse_asked(line)
            if asked is None or not self._expected(asked):
                self.damaged += 1
                continue
            if asked.question not in self.asked:
                kept.append(line + b"\n")
            self.asked.setdefault(asked.question, asked)
        return b"".join(kept)

    def _check_header(self, line: bytes) -> None:
        header = _object(line)
        if header is None or "journal" not in header:
            raise ConfigError(f"{self.path} is not a journal of an evaluation; name another file, or use --fresh")
        differing = _differences(header, self._header)
        if differing:
            raise ConfigError(
                f"{self.path} holds answers of another evaluation: {'; '.join(differing)}; name another file, or use --fresh"
            )


def parse_asked(line: bytes) -> Asked | None:
    """Return the question and answers that a line holds, or None if it is torn or damaged."""
    record = _object(line)
    if record is None or record.keys() != {"question", "answers", "skipped"}:
        return None
    question, answers, skipped = record["question"], record["answers"], record["skipped"]
    if not isinstance(question, str) or not isinstance(answers, dict) or not isinstance(skipped, str | None):
        return None
    if not answers and skipped is None:
        return None
    read: dict[str, Answer | None] = {}
    for method, values in answers.items():
        answer = None if values is None else _answer(values)
        if values is not None and answer is None:
            return None
        read[method] = answer
    return Asked(question, read, skipped)


def _answer(values: Any) -> Answer | None:
    if not isinstance(values, dict) or values.keys() != set(Answer.__slots__):
        return None
    text, tokens = values["text"], values["output_tokens"]
    if not isinstance(text, str) or type(tokens) is not int or tokens < 0:
        return None
    numbers = ("charged_ratio", "recompute_ratio", "ttft_s", "loss", "first_loss", "first_token")
    if any(values[name] is not None and not _is_number(values[name]) for name in numbers):
        return None
    return Answer(**values)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")


def _line(record: Mapping[str, Any]) -> bytes:
    # ASCII, so that only a line's end is a line's end.
    return json.dumps(record).encode("ascii") + b"\n"


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Say what differs between two headers, by the names of their items."""
    found = []
    for name in dict.fromkeys([*there, *here]):
        old, new = there.get(name), here.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{prefix}{name}.")
        elif old != new or (name in there) != (name in here):
            found.append(f"{prefix}{name} is {_shown(old)} there and {_shown(new)} here")
    return found


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
