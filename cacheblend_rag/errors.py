"""The errors that cacheblend-rag raises on purpose.

Every message says what was wrong, with which value, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "AnswerTimeoutError",
    "BackendError",
    "CacheBlendError",
    "ChunkReadError",
    "ConfigError",
    "EmptyChunkError",
    "PMLError",
    "PromptError",
    "PromptTooLongError",
    "RemoteUnavailableError",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "StoreReadOnlyError",
    "StructuredOutputError",
    "UnknownChunkError",
    "UnsupportedModelError",
]


class CacheBlendError(Exception):
    """Base class of all deliberate errors of this library."""


class ConfigError(CacheBlendError, ValueError):
    """A setting, or a file that holds settings or questions, is invalid, or contradicts another one."""


class PromptError(CacheBlendError):
    """A prompt, or a chunk in it, cannot be served."""


class UnknownChunkError(PromptError, KeyError):
    """A prompt or a call names a chunk id that was never added, or was deleted."""

    def __str__(self) -> str:
        # KeyError would show the repr of the message, quotes and escapes included.
        return str(self.args[0]) if self.args else ""


class EmptyChunkError(PromptError):
    """A chunk has no text, or its text has no tokens."""


class PromptTooLongError(PromptError):
    """A prompt has more tokens than the model's window holds."""


class BackendError(CacheBlendError):
    """The server that answers in this one's place has ended, cannot be reached, or answers something else."""


class PMLError(CacheBlendError, ValueError):
    """A schema or a prompt in the prompt markup language is wrong.

    Parameters
    ----------
    reason : str
        What is wrong, what was expected, and what to do.
    source : str, optional
        The file, or another name of the text. What was made in Python has none.
    line : int, optional
        The line of that text, counted from 1.

    Attributes
    ----------
    reason, source, line
        What was given.
    """

    def __init__(self, reason: str, *, source: str | None = None, line: int | None = None):
        place = [] if source is None else [source]
        if line is not None:
            place.append(f"line {line}")
        super().__init__(f"{', '.join(place)}: {reason}" if place else reason)
        self.reason = reason
        self.source = source
        self.line = line


class AnswerTimeoutError(CacheBlendError, TimeoutError):
    """An answer was not finished in the time that the caller allowed; the engine is free again."""


class StructuredOutputError(CacheBlendError, ValueError):
    """A model's answer does not have the requested form, or can no longer get it.

    Attributes
    ----------
    text : str
        What the model wrote; empty where a server does not say.
    """

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class UnsupportedModelError(CacheBlendError):
    """The KV of this model cannot be blended; the message says which part and why."""


class StoreError(CacheBlendError):
    """The chunk KV store cannot do what it was asked to do."""


class StoreFormatError(StoreError):
    """The folder is not a store, or was written in a format that this version does not read."""


class StoreFullError(StoreError):
    """The disk, or the store's byte budget, has no room for a write."""


class StoreReadOnlyError(StoreError):
    """A store folder that may not be written."""


class RemoteUnavailableError(StoreError, OSError):
    """A remote tier cannot be reached, does not answer in time, or refuses; its chunks are misses until it is back."""


class ChunkReadError(StoreError):
    """The stored KV of a chunk is missing, damaged, or not to be read here and now.

    Attributes
    ----------
    key : str
        The store key of the chunk, so that the caller can compute the chunk again.
    damaged : bool
        Whether the stored bytes are at fault, so that they are to be discarded. They are not where a
        remote tier does not answer, where another version of this library wrote them, or where the document has changed.
    """

    def __init__(self, key: str, reason: str, *, damaged: bool = True) -> None:
        super().__init__(f"stored KV {key[:12]}… cannot be read: {reason}; it will be computed again")
        self.key = key
        self.damaged = damaged


_OF_THE_CORE = ("documents", "files", "fsspec", "redis", "s3")
# What extras need beside the core that is not on any registry, by their names.
_BESIDE = {
    "demo": ("attachments", "pml", "llama_index", "langchain"),
    "documents": ("attachments",),
    "lab": ("attachments", "pml"),
    "ray": ("attachments", "serve"),
    "serve": ("attachments",),
}


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra of the core, or one of its other distributions, from a clone."""
    named = {"lab": "lab", "demo": "'lab[demo]'", **{each: f"'.[{each}]'" for each in _OF_THE_CORE}}
    parts = [named.get(extra, f"integrations/{extra}"), *(f"integrations/{each}" for each in _BESIDE.get(extra, ()))]
    return f"in the clone, pip install -c constraints.txt {' '.join(f'-e {each}' for each in parts)}"


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turn an ImportError in a ``with`` block into a `ConfigError` with the extra that `what`, its subject, needs."""
    try:
        yield
    except ImportError as error:
        # fsspec names what a filesystem needs in words alone.
        raise ConfigError(
            f"{what} needs a package that is not installed ({error.name or error}): {how_to_install(extra)}"
        ) from error
