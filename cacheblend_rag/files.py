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

_SHOWN = 300


def read_yaml_text(path: Path) -> str:
    """Return the text of a YAML file of settings, with its line ends; `ConfigError` if it cannot be read, or is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"settings file {path} cannot be read: {error}") from error


def load_yaml(text: str, name: str) -> Any:
    """Return what a YAML text holds; messages call it `name`."""
    try:
        return yaml.safe_load(text)
    except Exception as error:  # PyYAML raises what it meets: values that are not what their tags say
        raise ConfigError(f"settings file {name} cannot be read: {shorten(str(error), _SHOWN)}") from None


def replace_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file, its line ends as they are, so that it is there completely or not at all."""
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
