"""Settings of a library, and its folder; nothing else is imported, so that what is not there is told at once.

::

    library.json      the model, the embedding model and the length of passages it was warmed with
    warm.lock         held while a process changes the library
    chroma/           the passages and their vectors
    kv/               the engine's store
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.files import replace_text

__all__ = ["LibrarySettings", "kv_folder", "make_folder"]


def kv_folder(folder: Path) -> Path:
    """Return where a library keeps its chunk KV."""
    return folder / "kv"


def make_folder(folder: Path) -> None:
    """Make a library's folder, for its owner alone, unless it is there; `ConfigError` if it cannot be made."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder {folder} cannot be made: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class LibrarySettings:
    """Settings that a library was warmed with, so that later commands need not be told again."""

    model: str
    embedding: str
    chunk_tokens: int
    # Whether the last warming came to its end; one may be under way.
    finished: bool = True

    @classmethod
    def load(cls, folder: Path) -> LibrarySettings | None:
        """Return the settings of the library in `folder`, or None if there is none; `ConfigError` if they cannot be read."""
        path = folder / "library.json"
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); remove it and warm again") from error

    def save(self, folder: Path) -> None:
        """Write the settings, replacing earlier ones at once."""
        make_folder(folder)
        try:
            replace_text(folder / "library.json", json.dumps(asdict(self), indent=2) + "\n", private=True)
        except OSError as error:
            raise ConfigError(f"folder {folder} cannot be written: {error.strerror}") from error
