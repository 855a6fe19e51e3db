"""Replacing files."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

__all__ = ["replace_text"]


def replace_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text file so that it is there completely or not at all; a file that was there keeps its mode.

    Parameters
    ----------
    path : Path
        The file; its folder must exist.
    text : str
        What it is to hold, in UTF-8, with the line ends that it has.
    private : bool
        Whether it is readable by its owner alone (mode 0600), whatever its mode was.

    Raises
    ------
    OSError
        If it cannot be written.
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
