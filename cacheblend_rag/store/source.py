"""Random access to stored bytes, wherever they lie."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

__all__ = ["ByteSource", "FileSource"]


class ByteSource(Protocol):
    """The bytes of one stored chunk; they may be read from any thread, and never change."""

    @property
    def tier(self) -> str:
        """Where they are: "disk", or the scheme of a remote tier's URL."""

    @property
    def size(self) -> int:
        """How many bytes there are."""

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` with the bytes from `offset` on; return how many there were, fewer only where the bytes end.

        Raises
        ------
        OSError
            If they cannot be read.
        """


class FileSource:
    """A file, which stays readable when it is unlinked.

    Parameters
    ----------
    path : str
        The file.
    tier : str
        What the place is called.

    Raises
    ------
    OSError
        If it cannot be opened.
    """

    def __init__(self, path: str, tier: str = "disk") -> None:
        self.tier = tier
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # An argument, because the module's names may be gone when the interpreter ends.
        if self._fd >= 0:
            close(self._fd)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` with the bytes from `offset` on; return how many there were, fewer only where the file ends."""
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done
