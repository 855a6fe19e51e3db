"""The files of a calibration: a user's own questions, and settings in YAML written by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cacheblend_rag.config import BlendConfig, EngineConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.files import load_yaml, read_yaml_text, replace_text

__all__ = ["edit_settings", "read_questions", "write_settings"]

_FIELDS = ("question", "query")

Scalar = bool | int | float | str


def write_settings(path: str | Path, changes: Mapping[str, Scalar]) -> None:
    """Change settings in a YAML file, which is made if it is not there and replaced at once; other keys and comments stay.

    Parameters
    ----------
    path : str or Path
        The file; a link to it stays a link.
    changes : mapping of str to bool, int, float or str
        Fields of `BlendConfig` and their new values.

    Raises
    ------
    ConfigError
        If the file cannot be read or written, or its settings have no meaning, together with the changes.
    """
    target = Path(path).resolve()
    text = read_yaml_text(target) if target.exists() else ""
    edited = edit_settings(text, changes, name=str(path))
    named = {str(name): value for name, value in load_yaml(edited, str(path)).items()}
    for kind in (EngineConfig, BlendConfig):
        kind.from_mapping(named)
    try:
        replace_text(target, edited)
    except OSError as error:
        raise ConfigError(f"settings file {path} cannot be written: {error.strerror}") from error


def edit_settings(text: str, changes: Mapping[str, Scalar], *, name: str = "settings") -> str:
    """Return the text of a YAML mapping with some of its values changed.

    A value is replaced where it stands, and a new key is put at the end or the beginning, so that everything else stays as it was
    written. Where that would not mean what it should (a value that others refer to, a mapping in braces that gets a new key), the
    mapping is written anew, without comments.

    `name` is what messages call the text.
    """
    values = load_yaml(text, name)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"settings file {name} holds a {type(values).__name__}; it must be a mapping of names to values"
        )
    wanted = values | dict(changes)
    # What has its value already stays as it was written.
    changes = {key: value for key, value in changes.items() if key not in values or repr(values[key]) != repr(value)}
    for edited in _edits(text, root if isinstance(root, yaml.MappingNode) else None, changes):
        try:
            if _items(yaml.safe_load(edited)) == _items(wanted):
                return edited
        except (yaml.YAMLError, ValueError, TypeError):
            continue
    return _dumped(wanted)


def _edits(text: str, root: yaml.MappingNode | None, changes: Mapping[str, Scalar]) -> Iterator[str]:
    """Yield the text with new keys at its end, and with new keys before the first one."""
    # Of a key that stands twice the last counts.
    places = {key.value: value for key, value in root.value} if root is not None else {}
    spans = [
        (places[key].start_mark.index, places[key].end_mark.index, _written(value))
        for key, value in changes.items()
        if key in places
    ]
    for start, end, value in sorted(spans, reverse=True):
        # After "key:" without a value there may be no space.
        gap = "" if start and text[start - 1].isspace() else " "
        text = text[:start] + gap + value + text[end:]
    indent = " " * (root.start_mark.column if root is not None else 0)
    new = [f"{key}: {_written(value)}\n" for key, value in changes.items() if key not in places]
    line_end = "\n" if new and text and not text.endswith("\n") else ""
    yield text + line_end + "".join(indent + line for line in new)
    if root is not None:
        start = root.start_mark.index
        yield text[:start] + "".join(line + indent for line in new) + text[start:]


def _items(values: dict[Any, Any]) -> list[tuple[str, str]]:
    # As they are written, since True equals 1 and nan does not equal itself; in any order.
    return sorted((repr(key), repr(value)) for key, value in values.items())


def _written(value: Scalar) -> str:
    return _dumped({"value": value}).removeprefix("value:").strip(" \n")


def _dumped(values: dict[Any, Any]) -> str:
    """Return a mapping as YAML, with its letters as they are wherever they can be read back."""
    # Without a limit no line is folded, so that one value stays one line.
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=math.inf)
    # A few characters that YAML takes for line breaks do not survive unless they are escaped.
    readable = _items(yaml.safe_load(text)) == _items(values)
    return text if readable else yaml.safe_dump(values, sort_keys=False, width=math.inf)


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
