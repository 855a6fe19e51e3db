"""The files of a calibration: a user's own questions, and settings in YAML written by hand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.files import load_yaml, read_yaml_text, replace_text

__all__ = ["read_questions", "write_settings"]

_FIELDS = ("question", "query")


def write_settings(path: str | Path, changes: Mapping[str, bool | float | str]) -> None:
    """Set keys of a YAML file, which is made if it is not there and replaced at once; other lines and comments stay.

    A line ``key: value`` is changed where it stands, and a new one is put at the end; `ConfigError` where that would not mean
    what it should, or the file cannot be read or written.
    """
    target = Path(path).resolve()
    text = read_yaml_text(target) if target.exists() else ""
    lines = {key: yaml.safe_dump({key: value}, width=math.inf).strip() for key, value in changes.items()}
    edited = text
    for key, line in lines.items():
        # What follows is white space, a comment or the end of the line.
        value = rf"(?m)^{re.escape(key)}:[^#\r\n]*?(?=[ \t]*(?:#|\r?$))"
        edited, found = re.subn(value, line.replace("\\", r"\\"), edited)
        if not found:
            edited += "\n" * (edited != "" and not edited.endswith("\n")) + line + "\n"
    try:
        understood = load_yaml(edited, str(path)) == (load_yaml(text, str(path)) or {}) | dict(changes)
    except (ConfigError, TypeError):
        understood = False
    if not understood:
        raise ConfigError(
            f"settings file {path} has more than lines of `key: value`; write into it yourself: {', '.join(lines.values())}"
        )
    try:
        replace_text(target, edited)
    except OSError as error:
        raise ConfigError(f"settings file {path} cannot be written: {error.strerror}") from error


def read_questions(path: str | Path) -> dict[str, str | None]:
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
        raise ConfigError(f"questions file {path} holds no question; write one per line")
    return questions


def _question(line: str, place: str) -> tuple[str, str | None]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not JSON ({error}); name the file .txt if it holds plain questions") from error
    answer = value.get("answer") if isinstance(value, dict) else None
    # What other programs keep there, a list for example, is no single right answer.
    answer = str(answer).strip() or None if isinstance(answer, str | int | float) else None
    if isinstance(value, dict):
        value = next((value[name] for name in _FIELDS if name in value), None)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f'{place} holds no question; write {{"question": "..."}} or a string')
    return value, answer
