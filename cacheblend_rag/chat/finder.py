"""Finding known texts inside a longer one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from cacheblend_rag.chunk import text_hash

__all__ = ["HEAD_CHARS", "ChunkFinder", "Match"]

HEAD_CHARS = 16
"""Number of leading characters that a text is recognised by; shorter texts are not found."""


class Match(NamedTuple):
    """A known text that stands at ``text[start:stop]``, and all of its ids."""

    start: int
    stop: int
    ids: tuple[str, ...]


class ChunkFinder:
    """Finds every known text that occurs verbatim in a longer one; not thread-safe."""

    def __init__(self) -> None:
        # Of each text the digest, by which it is known again, its beginning and its length.
        self._entries: dict[str, tuple[str, str, int]] = {}
        self._ids: dict[str, dict[str, None]] = {}
        # How many texts of each length begin alike.
        self._lengths: dict[str, Counter[int]] = {}

    def add(self, texts: Iterable[tuple[str, str]]) -> None:
        """Make texts known, as pairs of id and text; an id that is known is replaced."""
        for id, text in texts:
            if len(text) < HEAD_CHARS:
                continue
            self.remove([id])
            digest, head = text_hash(text), text[:HEAD_CHARS]
            self._entries[id] = digest, head, len(text)
            self._ids.setdefault(digest, {})[id] = None
            self._lengths.setdefault(head, Counter())[len(text)] += 1

    def remove(self, ids: Iterable[str]) -> None:
        """Make texts unknown; ids that are not known do no harm."""
        for id in ids:
            if id not in self._entries:
                continue
            digest, head, length = self._entries.pop(id)
            del self._ids[digest][id]
            if not self._ids[digest]:
                del self._ids[digest]
            lengths = self._lengths[head]
            lengths[length] -= 1
            if not lengths[length]:
                del lengths[length]
            if not lengths:
                del self._lengths[head]

    def digest(self, id: str) -> str | None:
        """Return the digest of the text known as `id`, or None."""
        return self._entries[id][0] if id in self._entries else None

    def ids(self) -> set[str]:
        """Return the ids of all known texts."""
        return set(self._entries)

    def find(self, text: str, min_chars: int = HEAD_CHARS) -> list[Match]:
        """Return where known texts of `min_chars` or more stand in `text`, in order; of those that overlap, the longest."""
        found: list[Match] = []
        for start in range(len(text) - HEAD_CHARS + 1):
            for length in self._lengths.get(text[start : start + HEAD_CHARS], ()):
                if min_chars <= length <= len(text) - start:
                    digest = text_hash(text[start : start + length])
                    if digest in self._ids:
                        found.append(Match(start, start + length, tuple(self._ids[digest])))
        chosen: list[Match] = []
        for match in sorted(found, key=lambda match: (match.start - match.stop, match.start)):
            if all(match.stop <= other.start or other.stop <= match.start for other in chosen):
                chosen.append(match)
        return sorted(chosen)
