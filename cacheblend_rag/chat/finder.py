"""Finding known texts inside a longer one."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from cacheblend_rag.chunk import text_hash

__all__ = ["HEAD_CHARS", "ChunkFinder", "Match"]

HEAD_CHARS = 16
"""Number of leading characters that a text is recognised by; shorter texts are not found."""


class Match(NamedTuple):
    """A known text that stands at ``text[start:stop]``, all of its ids, and its `cacheblend_rag.chunk.text_hash`."""

    start: int
    stop: int
    ids: tuple[str, ...]
    digest: str


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
        """Return the places in `text` where known texts of `min_chars` or more stand, in order and without overlap."""
        found: list[Match] = []
        for start in range(len(text) - HEAD_CHARS + 1):
            for length in self._lengths.get(text[start : start + HEAD_CHARS], ()):
                if min_chars <= length <= len(text) - start:
                    digest = text_hash(text[start : start + length])
                    if digest in self._ids:
                        found.append(Match(start, start + length, tuple(self._ids[digest]), digest))
        return _best_cover(found)


def _best_cover(matches: list[Match]) -> list[Match]:
    """Choose matches without overlap that cover the most characters, then the fewest of them."""
    matches = sorted(matches, key=lambda match: match.stop)
    stops = [match.stop for match in matches]
    # scores[i] is the best that the first i matches allow: characters covered, and minus the number of matches.
    scores = [(0, 0)]
    taken_after: list[int | None] = []
    for number, match in enumerate(matches):
        before = bisect_right(stops, match.start, 0, number)
        covered, count = scores[before]
        with_it = (covered + match.stop - match.start, count - 1)
        taken_after.append(before if with_it > scores[-1] else None)
        scores.append(max(with_it, scores[-1]))
    chosen: list[Match] = []
    number = len(matches)
    while number:
        before_it = taken_after[number - 1]
        if before_it is None:
            number -= 1
        else:
            chosen.append(matches[number - 1])
            number = before_it
    return chosen[::-1]
