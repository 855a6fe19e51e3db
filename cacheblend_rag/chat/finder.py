"""Finding known texts inside a longer one."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.chunk import text_hash

__all__ = ["HEAD_CHARS", "ChunkFinder", "Match"]

HEAD_CHARS = 16
"""Number of leading characters that a text is recognised by; shorter texts are not found."""

# A random odd number: odd, so that its powers can be divided by, modulo 2**64.
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
_FILTER_BITS = 22
# Modulo a power of two the high bits are the mixed ones.
_FILTER_SHIFT = np.uint64(64 - _FILTER_BITS)
_FEW_LENGTHS = 16


class Match(NamedTuple):
    """A known text that stands at ``text[start:stop]``, all of its ids, and its `cacheblend_rag.chunk.text_hash`."""

    start: int
    stop: int
    ids: tuple[str, ...]
    digest: str


class _Entry(NamedTuple):
    head: int
    whole: int
    length: int
    digest: str


class _SliceHashes:
    """Polynomial hashes, modulo 2**64, of any slice of a text, after one pass over it."""

    def __init__(self, text: str) -> None:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64) + np.uint64(1)
        powers = np.ones((2, len(codes) + 1), np.uint64)
        powers[:, 1:] = [[_BASE], [_INVERSE]]
        np.cumprod(powers, axis=1, out=powers)
        self._inverses: NDArray[np.uint64] = powers[1]
        self._sums = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum(codes * powers[0, :-1], out=self._sums[1:])

    def slices(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the hash of each ``text[start:stop]``."""
        return (self._sums[stops] - self._sums[starts]) * self._inverses[starts]


class ChunkFinder:
    """Finds every known text that occurs verbatim in a longer one; not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._ids: dict[int, dict[str, None]] = {}
        # How many texts of each length begin with the same characters, and these lengths in order where they are many.
        self._lengths: dict[int, Counter[int]] = {}
        self._sorted: dict[int, NDArray[np.int64]] = {}
        self._heads = np.zeros(1 << _FILTER_BITS, np.bool_)
        self._wholes = np.zeros(1 << _FILTER_BITS, np.bool_)

    def add(self, texts: Iterable[tuple[str, str]]) -> None:
        """Make texts known, as pairs of id and text; an id that is known is replaced."""
        pairs = [(id, text) for id, text in dict(texts).items() if len(text) >= HEAD_CHARS]
        if not pairs:
            return
        self.remove(id for id, _ in pairs)
        # One pass over all of them together: numpy is slow on short arrays.
        stops = np.cumsum([len(text) for _, text in pairs])
        starts = np.concatenate(([0], stops[:-1]))
        hashes = _SliceHashes("".join(text for _, text in pairs))
        heads = hashes.slices(starts, starts + HEAD_CHARS)
        wholes = hashes.slices(starts, stops)
        self._heads[heads >> _FILTER_SHIFT] = True
        self._wholes[wholes >> _FILTER_SHIFT] = True
        for (id, text), head, whole in zip(pairs, heads.tolist(), wholes.tolist(), strict=True):
            self._entries[id] = _Entry(head, whole, len(text), text_hash(text))
            self._ids.setdefault(whole, {})[id] = None
            self._lengths.setdefault(head, Counter())[len(text)] += 1
            self._sorted.pop(head, None)

    def remove(self, ids: Iterable[str]) -> None:
        """Make texts unknown; ids that are not known do no harm."""
        for id in ids:
            entry = self._entries.pop(id, None)
            if entry is None:
                continue
            # Its places in the tables stay: others may share them, and one too many costs a look into a dictionary.
            del self._ids[entry.whole][id]
            if not self._ids[entry.whole]:
                del self._ids[entry.whole]
            lengths = self._lengths[entry.head]
            lengths[entry.length] -= 1
            if not lengths[entry.length]:
                del lengths[entry.length]
                self._sorted.pop(entry.head, None)
            if not lengths:
                del self._lengths[entry.head]

    def digest(self, id: str) -> str | None:
        """Return the digest of the text known as `id`, or None."""
        entry = self._entries.get(id)
        return None if entry is None else entry.digest

    def ids(self) -> set[str]:
        """Return the ids of all known texts."""
        return set(self._entries)

    def find(self, text: str, min_chars: int = HEAD_CHARS) -> list[Match]:
        """Return the places in `text` where known texts of `min_chars` or more stand, in order and without overlap."""
        if len(text) < HEAD_CHARS or not self._entries:
            return []
        hashes = _SliceHashes(text)
        starts = np.arange(len(text) - HEAD_CHARS + 1)
        heads = hashes.slices(starts, starts + HEAD_CHARS)
        possible = np.flatnonzero(self._heads[heads >> _FILTER_SHIFT])
        # All places are compared in one go: numpy is slow on short arrays, and most heads are those of a few texts.
        places: list[tuple[int, int]] = []
        of_many: list[NDArray[np.int64]] = []
        for start, head in zip(possible.tolist(), heads[possible].tolist(), strict=True):
            lengths = self._lengths.get(head)
            if lengths is None:
                continue
            most = len(text) - start
            if len(lengths) > _FEW_LENGTHS:
                if head not in self._sorted:
                    self._sorted[head] = np.sort(np.fromiter(lengths, np.int64, len(lengths)))
                first, last = np.searchsorted(self._sorted[head], [min_chars, most + 1])
                stops = self._sorted[head][first:last] + start
                of_many.append(np.stack((np.full_like(stops, start), stops), axis=1))
            else:
                places += [(start, start + length) for length in lengths if min_chars <= length <= most]
        slices = np.concatenate([np.array(places, np.int64).reshape(-1, 2), *of_many])
        wholes = hashes.slices(*slices.T)
        found: list[Match] = []
        for number in np.flatnonzero(self._wholes[wholes >> _FILTER_SHIFT]).tolist():
            start, stop = slices[number].tolist()
            ids = self._ids.get(int(wholes[number]))
            if ids is not None:
                digest = text_hash(text[start:stop])
                same = tuple(id for id in ids if self._entries[id].digest == digest)
                found += [Match(start, stop, same, digest)] if same else []
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
