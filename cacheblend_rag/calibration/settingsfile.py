"""Changing settings in a YAML file that somebody wrote by hand."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import ConfigError

__all__ = ["edit_settings", "write_settings"]

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
    try:
        text = target.read_bytes().decode() if target.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"settings file {path} cannot be read: {error}") from error
    edited = edit_settings(text, changes, name=str(path))
    BlendConfig(**{str(name): value for name, value in yaml.safe_load(edited).items()})
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", newline="", dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(edited)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        else:
            # A temporary file is its owner's alone; a settings file is made like any other.
            mask = os.umask(0)
            os.umask(mask)
            temporary.chmod(0o666 & ~mask)
        temporary.replace(target)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise ConfigError(f"settings file {path} cannot be written: {error.strerror}") from error


def edit_settings(text: str, changes: Mapping[str, Scalar], *, name: str = "settings") -> str:
    """Return the text of a YAML mapping with some of its values changed.

    A value is replaced where it stands, and a new key is put at the end or the beginning, so that everything else stays as it was
    written. Where that would not mean what it should (a value that others refer to, a mapping in braces that gets a new key), the
    mapping is written anew, without comments.

    Parameters
    ----------
    text : str
        One YAML mapping, or nothing.
    changes : mapping of str to bool, int, float or str
        Keys and their new values.
    name : str
        What messages call the text.

    Raises
    ------
    ConfigError
        If the text is no YAML mapping.
    """
    try:
        values = yaml.safe_load(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"settings file {name} cannot be read: {error}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"settings file {name} holds a {type(values).__name__}; it must be a mapping of names to values"
        )
    wanted = values | dict(changes)
    # What has its value already stays as somebody wrote it.
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
        # Behind "key:" without a value there may be no space.
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
