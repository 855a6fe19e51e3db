"""Folders of replicas' own, below one that a machine has for all of them; who starts again finds what it left."""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cacheblend_rag.errors import ConfigError

__all__ = ["Slot", "own_folder"]

_MOST_REPLICAS = 1000


class Slot:
    """A replica's own folder.

    Attributes
    ----------
    path : Path
        The folder.
    home : str
        What the replica is called, from start to start: the machine and the folder's number.
    """

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.home = f"{socket.gethostname()}/{number}"


@contextmanager
def own_folder(root: Path) -> Iterator[Slot]:
    """Have the first folder below `root` that no other process of this machine has, for the time of a ``with`` block.

    Raises
    ------
    ConfigError
        If none can be had.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(_MOST_REPLICAS):
            with open(root / f"replica-{number}.lock", "w", encoding="ascii") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield Slot(root / f"replica-{number}", number)
                return
    except OSError as error:
        raise ConfigError(f"folder {root} cannot be written: {error.strerror}") from error
    raise ConfigError(f"all {_MOST_REPLICAS} folders below {root} are in use; give another folder")
