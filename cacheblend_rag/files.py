"""Files: replaced at once, and YAML of settings."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from textwrap import shorten
from typing import Any
from uuid import uuid4

import yaml

from cacheblend_rag.errors import ConfigError

__all__ = ["load_yaml", "read_yaml_text", "replace_text"]

_LONGEST_YAML_BYTES = 128 * 1024
_DEEPEST_YAML = 20
_SHOWN = 300


def read_yaml_text(path: Path) -> str:
    """Return the text of a YAML file of settings; `ConfigError` if it cannot be read, is not UTF-8, or is too long."""
    try:
        with open(path, "rb") as file:
            data = file.read(_LONGEST_YAML_BYTES + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"settings file {path} cannot be read: {error}") from error
    if len(data) > _LONGEST_YAML_BYTES:
        raise ConfigError(f"settings file {path} cannot be read: it has more than {_LONGEST_YAML_BYTES} bytes")
    return text


def load_yaml(text: str, name: str) -> Any:
    """Return what a YAML text holds, as `yaml.safe_load` does, without aliases; messages call it `name`."""
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except Exception as error:  # PyYAML raises what it meets: values that are not what their tags say
        raise ConfigError(f"settings file {name} cannot be read: {shorten(str(error), _SHOWN)}") from None


class _PlainLoader(yaml.SafeLoader):
    """Refuses aliases, by which a short text may stand for a very long one, and what is nested more deeply than settings."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has aliases; write each value out")
        self.depth += 1
        if self.depth > _DEEPEST_YAML:
            raise ValueError(f"it is nested more than {_DEEPEST_YAML} levels deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def replace_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file, its line ends as they are, so that it is there completely or not at all.

    A file that was there keeps its mode; with `private` it is readable by its owner alone (mode 0600).
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with open(fd, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if not private:
            with suppress(FileNotFoundError):
                shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
