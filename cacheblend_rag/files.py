"""Files that are replaced at once."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

__all__ = ["replace_text"]


def replace_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file, its line ends as they are, so that it is there completely or not at all."""
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with open(fd, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
