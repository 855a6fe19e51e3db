"""A user's own questions, from a file."""

from __future__ import annotations

import json
from pathlib import Path

from cacheblend_rag.errors import ConfigError

__all__ = ["read_questions", "read_questions_and_answers"]

_FIELDS = ("question", "query")


def read_questions(path: str | Path) -> list[str]:
    """Read questions; see `read_questions_and_answers`."""
    return list(read_questions_and_answers(path))


def read_questions_and_answers(path: str | Path) -> dict[str, str | None]:
    """Read questions, one a line; empty lines are skipped, and a question that recurs counts once.

    Parameters
    ----------
    path : str or Path
        A text file; or, if its name ends in ``.jsonl``, lines of JSON, each a string or an object whose `question` (or `query`)
        is one; an object may have the right `answer` too, a text or a number. UTF-8.

    Returns
    -------
    dict of (str, str or None)
        The questions, in order, without white space around them, with the answers where they are given.

    Raises
    ------
    ConfigError
        If the file cannot be read, a line is none of this, or there is no question.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"questions file {path} cannot be read: {error}") from error
    structured = path.suffix.lower() == ".jsonl"
    questions: dict[str, str | None] = {}
    # Not splitlines, which also splits at characters that may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            question, answer = _question(line, f"line {number} of {path}") if structured else (line, None)
            questions.setdefault(question.strip(), answer)
    if not questions:
        raise ConfigError(f"questions file {path} holds no question; write one a line")
    return questions


def _question(line: str, place: str) -> tuple[str, str | None]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is no JSON ({error}); name the file .txt if it holds plain questions") from error
    answer = value.get("answer") if isinstance(value, dict) else None
    # What other programs keep there, a list for example, is no single right answer.
    answer = str(answer).strip() or None if isinstance(answer, str | int | float) else None
    if isinstance(value, dict):
        value = next((value[name] for name in _FIELDS if name in value), None)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f'{place} holds no question; write {{"question": "..."}} or a string')
    return value, answer
