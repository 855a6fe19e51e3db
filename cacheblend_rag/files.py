"""Files: replaced at once, and YAML from anybody, read within bounds."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from cacheblend_rag.errors import ConfigError

__all__ = ["load_yaml", "read_yaml_text", "replace_text"]

# Of a file, and of its values with every alias written out; a value counts as this many bytes more than its characters.
_LONGEST_YAML_BYTES = 128 * 1024
_VALUE_BYTES = 32
_DEEPEST_YAML = 20
# No number, date or tag is longer.
_LONGEST_PLAIN = 200
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
    """Return what a YAML text holds, as `yaml.safe_load` does; messages call it `name`.

    `ConfigError` if it is not YAML, is nested too deeply, or is too long once its aliases are written out.
    """
    try:
        loader = _BoundedLoader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    # PyYAML raises all of these for values that are not what their tags say.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        reason = str(error)
        shown = reason if len(reason) <= _SHOWN else reason[:_SHOWN] + "…"
        raise ConfigError(f"settings file {name} cannot be read: {shown}") from None


class _BoundedLoader(yaml.SafeLoader):
    """Builds nothing that is larger, or nested more deeply, than settings are."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nbytes = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next value; ValueError if it goes beyond the bounds."""
        is_alias = self.check_event(yaml.AliasEvent)
        before = self._nbytes
        self._depth += 1
        if self._depth > _DEEPEST_YAML:
            raise ValueError(f"it is nested more than {_DEEPEST_YAML} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if is_alias and id(node) not in self._sizes:
            raise ValueError("an alias refers to what it is part of")
        value = node.value if isinstance(node, yaml.ScalarNode) else ""
        if len(node.tag) > _LONGEST_PLAIN or (len(value) > _LONGEST_PLAIN and node.tag != "tag:yaml.org,2002:str"):
            raise ValueError(f"a value that is no text has more than {_LONGEST_PLAIN} characters")
        self._nbytes += self._sizes[id(node)] if is_alias else _VALUE_BYTES + len(value)
        if self._nbytes > _LONGEST_YAML_BYTES:
            raise ValueError(f"its values, with aliases written out, take more than {_LONGEST_YAML_BYTES} bytes")
        self._sizes.setdefault(id(node), self._nbytes - before)
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
