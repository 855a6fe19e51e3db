"""Error message for a missing package: the extra that brings it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cacheblend_rag.errors import ConfigError

__all__ = ["needs_extra"]


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turn an ImportError in a ``with`` block into a `ConfigError` with the extra that `what`, its subject, needs."""
    try:
        yield
    except ImportError as error:
        # fsspec names what a filesystem needs in words alone.
        raise ConfigError(
            f'{what} needs a package that is not installed ({error.name or error}): pip install "cacheblend-rag[{extra}]", or '
            "in a clone as docs/install.md says"
        ) from error
