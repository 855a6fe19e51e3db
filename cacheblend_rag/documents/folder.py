"""The folder of a library.

::

    library.json      the model, the embedding model and the length of passages it was warmed with
    warm.lock         held while a process changes the library
    chroma/           the passages and their vectors
    kv/               the engine's store
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.extras import needs_extra
from cacheblend_rag.store import open_store

if TYPE_CHECKING:
    from chromadb.api.client import Client

__all__ = [
    "PASSAGES",
    "LibrarySettings",
    "alone_in",
    "chroma_of",
    "clear_library",
    "is_library",
    "kv_folder",
    "open_chroma",
]

PASSAGES = "passages"
"""The name of the Chroma collection."""


def kv_folder(folder: Path) -> Path:
    """Return where a library keeps its chunk KV."""
    return folder / "kv"


def is_library(folder: Path) -> bool:
    """Return whether something was warmed into `folder`."""
    return (folder / "library.json").is_file() and kv_folder(folder).is_dir()


def open_chroma(folder: Path) -> Client:
    """Open the Chroma of a library, making it if there is none.

    Raises
    ------
    StoreError
        If it cannot be opened.
    """
    with needs_extra("documents", "a library of documents"):
        import chromadb
        from chromadb.config import Settings

    try:
        client = chromadb.PersistentClient(str(folder / "chroma"), settings=Settings(anonymized_telemetry=False))
    except Exception as error:
        # Of any type: where opening fails, cleaning up after it fails too, and hides the reason.
        raise _failure(folder, error.__context__ or error) from error
    return cast("Client", client)


@contextmanager
def chroma_of(folder: Path) -> Iterator[None]:
    """Turn Chroma's errors into one of ours that says whose they are.

    Raises
    ------
    StoreError
        If Chroma failed inside the block.
    """
    from chromadb.errors import ChromaError

    try:
        yield
    except ChromaError as error:
        raise _failure(folder, error) from error


def _failure(folder: Path, reason: BaseException) -> StoreError:
    return StoreError(
        f"Chroma in {folder / 'chroma'} failed: {reason}; if it is damaged, remove that folder and warm again"
    )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from changing the library meanwhile.

    Raises
    ------
    ConfigError
        If one is changing it now.
    """
    with open(folder / "warm.lock", "w", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process is changing {folder}; wait until it is done") from error
        yield


def clear_library(folder: Path) -> None:
    """Remove every passage and all KV; the folder stays.

    Raises
    ------
    ConfigError
        If another process is changing the library.
    """
    from chromadb.errors import NotFoundError

    with alone_in(folder), chroma_of(folder):
        client = open_chroma(folder)
        try:
            client.delete_collection(PASSAGES)
        except NotFoundError:
            pass
        finally:
            client.close()
        store = open_store(kv_folder(folder), ram_bytes=0)
        try:
            store.clear()
        finally:
            store.close()


@dataclass(frozen=True, slots=True)
class LibrarySettings:
    """What a library was warmed with, so that later commands need not be told again."""

    model: str
    embedding: str
    chunk_tokens: int

    @classmethod
    def load(cls, folder: Path) -> LibrarySettings | None:
        """Return the settings of the library in `folder`, or None if there is none.

        Raises
        ------
        ConfigError
            If they cannot be read.
        """
        path = folder / "library.json"
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); remove it and warm again") from error

    def save(self, folder: Path) -> None:
        """Write the settings, replacing earlier ones at once."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f"library.json.{os.getpid()}.tmp"
            temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
            temporary.rename(folder / "library.json")
        except OSError as error:
            raise ConfigError(f"folder {folder} cannot be written: {error.strerror}") from error
