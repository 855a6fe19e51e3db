"""Searches that show a reader some chunks of a document and not others."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["FilterWatch"]

logger = logging.getLogger(__name__)

# What stores call the argument, in their searches.
_ARGUMENTS = ("filter", "pre_filter", "where")


class FilterWatch:
    """Warns of searches that filter by something that does not divide documents, once for each key.

    Parameters
    ----------
    divides : frozenset of str or None
        The metadata keys that no document has two values of; None where no chunk knows of another.
    """

    def __init__(self, divides: frozenset[str] | None) -> None:
        self._divides = divides
        self._said: set[str] = set()

    def see(self, arguments: Mapping[str, Any]) -> None:
        """Look at the arguments of a search."""
        if self._divides is None:
            return
        for name in _ARGUMENTS:
            for key in _keys(arguments.get(name)):
                if key not in self._divides and key not in self._said:
                    self._said.add(key)
                    self._warn(key)

    @staticmethod
    def _warn(key: str) -> None:
        logger.warning(
            "a search filters by %s, which is not declared as a boundary. The KV of a chunk carries traces of the document it "
            "stands in, so an answer from chunks that a reader may see can show something of others, in the same document, which "
            "the filter keeps from that reader. If that is what the filter is for, make the store with boundary=[...] naming the "
            'metadata key (no chunk is then encoded behind one of another value) or with context="none", and add or warm the '
            "documents again; else nothing is to be done (this is said once for each key)",
            key,
        )


def _keys(given: Any) -> Iterator[str]:
    """Yield the metadata keys that a filter names, or a word for a filter that cannot be looked into."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            if not str(key).startswith("$"):
                yield str(key)
            else:
                yield from _keys(value)
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _keys(each)
    elif given is not None:
        yield f"a {type(given).__name__}"
