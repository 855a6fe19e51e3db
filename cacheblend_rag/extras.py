"""Error message for a missing package: the extra that brings it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cacheblend_rag.errors import ConfigError

__all__ = ["needs_extra"]


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turn a failing import inside a ``with`` block into a message that says what to install.

    Parameters
    ----------
    extra : str
        The extra of cacheblend-rag that brings the package.
    what : str
        What the package is needed for, as the subject of a sentence.

    Raises
    ------
    ConfigError
        If an import inside the block fails.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f'{what} needs a package that is not installed ({error.name}): pip install "cacheblend-rag[{extra}]"'
        ) from error
