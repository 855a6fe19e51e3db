"""The files that a schema may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cacheblend_rag.pml.nodes import Place

__all__ = ["MAX_FILE_BYTES", "Files"]

MAX_FILE_BYTES = 64 * 2**20
"""The largest file that is read."""


class Files:
    """The files below one folder.

    Parameters
    ----------
    root : Path
        The folder. What lies outside of it is not read, symbolic links followed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def read(self, name: str, place: Place) -> tuple[str, Path]:
        """Read a file that a schema names.

        Parameters
        ----------
        name : str
            Its path, from the root.
        place : Place
            Where it is named.

        Returns
        -------
        tuple of (str, Path)
            Its text, and where it is.

        Raises
        ------
        PMLError
            If it lies outside of the root, is no file, cannot be read, is too large, or is not UTF-8.
        """
        shown = f"src={name[:100]!r}"
        if not name or "\0" in name:
            raise place.error(f'{shown} names no file; write src="..." with a path below {self.root.name!r}')
        try:
            path = (self.root / name).resolve()
            if not path.is_relative_to(self.root):
                raise place.error(f"{shown} lies outside of the folder {self.root.name!r}, below which files are read")
            return _read_text(path), path
        except UnicodeDecodeError as error:
            raise place.error(f"{shown} is not UTF-8 (byte {error.start}); convert it") from None
        except UnicodeEncodeError:
            raise place.error(f"{shown} is no name that a file can have") from None
        except (OSError, RuntimeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            raise place.error(f"{shown} cannot be read: {reason}") from error


def _read_text(path: Path) -> str:
    # Not blocking, so that a pipe that nobody writes to is found out instead of waited for.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with open(handle, "rb") as file:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode):
            raise OSError("it is no ordinary file")
        if state.st_size > MAX_FILE_BYTES:
            raise OSError(f"it has {state.st_size} bytes, more than {MAX_FILE_BYTES}")
        data = file.read(MAX_FILE_BYTES)
    return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
