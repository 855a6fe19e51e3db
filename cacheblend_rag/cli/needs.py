"""Saying which package a command lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cacheblend_rag.errors import ConfigError

__all__ = ["needs_langchain"]


@contextmanager
def needs_langchain() -> Iterator[None]:
    """Turn a failing import inside a ``with`` block into a message that says what to install."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"this command needs a package that is not installed ({error.name}); install it with: "
            'pip install "cacheblend-rag[langchain]"'
        ) from error
