"""Reading order of a document's chunks, and the tokens that each of them is encoded after."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TypeVar

__all__ = ["Context", "Member", "Place", "ReadingRules", "contexts", "in_order", "overlap", "relinked", "whole_text"]

_LEAST_OVERLAP = 16
"""Characters; fewer are alike by chance."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a chunk in its document."""

    document: str
    # Where the chunk's body begins in it, in characters.
    start: int | None
    # The id of the chunk before it, where it has no `start`.
    previous: str | None
    # Characters of its body.
    length: int
    # The body, where there is no `start` to tell overlaps by; else empty.
    text: str
    # For each of its tokens, how many characters of the body have ended with it.
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """A chunk of a document: its id, its tokens, and its place."""

    id: str
    token_ids: tuple[int, ...]
    place: Place


AnyMember = TypeVar("AnyMember", bound=Member)


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """Rules by which documents are read."""

    # Most tokens of a context and the chunk after it.
    limit: int | None = None
    # What stands between two chunks that do not overlap, in tokens.
    separator: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Context:
    """Context that a chunk is encoded after: tokens `begin` to `end` of its document's text, which all its chunks share."""

    # The number of the chunk that it begins with, in reading order.
    first: int
    text: tuple[int, ...]
    begin: int
    end: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its tokens."""
        return self.text[self.begin : self.end]


def in_order(members: Collection[AnyMember]) -> list[AnyMember]:
    """Return a document's chunks in reading order: those with a `start` by it, others after their `previous`, or last."""
    known = {member.id for member in members}
    followers: dict[str, list[AnyMember]] = {}
    firsts: list[AnyMember] = []
    for member in members:
        place = member.place
        if place.start is None and place.previous in known:
            followers.setdefault(str(place.previous), []).append(member)
        else:
            firsts.append(member)
    firsts.sort(key=lambda member: math.inf if member.place.start is None else member.place.start)
    ordered: list[AnyMember] = []
    for first in firsts:
        stack = [first]
        while stack:
            member = stack.pop()
            ordered.append(member)
            stack.extend(reversed(followers.pop(member.id, [])))
    # Chunks that name each other in a circle come last.
    ordered += [member for circle in followers.values() for member in circle]
    return ordered


def overlap(before: Place, after: Place) -> int:
    """Return how many characters of `before` are read again at the beginning of `after`, which follows it."""
    if before.start is not None and after.start is not None:
        return max(0, before.start + before.length - after.start)
    head, tail = after.text[:_LEAST_OVERLAP], before.text[-len(after.text) :] if after.text else ""
    place = tail.find(head) if len(head) == _LEAST_OVERLAP else -1
    while place >= 0 and not after.text.startswith(tail[place:]):
        place = tail.find(head, place + 1)
    return len(tail) - place if place >= 0 else 0


def contexts(members: Sequence[Member], rules: ReadingRules) -> list[Context]:
    """Return the context of each chunk of a document, which are given in reading order.

    A document that is longer than the rules allow is read in windows: the first begins with the first chunk, and where a
    chunk does not fit any more the next one begins at the border of a chunk before it, so that at most a quarter of a
    window is read again. What is cropped on the left is still remembered by the KV that is left; a window knows of nothing
    before it.
    """
    # What each chunk leaves for those after it.
    pieces = [_left(before, after, rules.separator) for before, after in pairwise(members)]
    sizes = [len(member.token_ids) + len(rules.separator) for member in members]
    text = tuple(chain.from_iterable(pieces))
    ends = list(accumulate(map(len, pieces), initial=0))
    found: list[Context] = []
    first = 0
    for number, (size, end) in enumerate(zip(sizes, ends, strict=False)):
        if rules.limit is not None and end - ends[first] + size > rules.limit:
            most = min(rules.limit // 4, rules.limit - size)
            while first < number and end - ends[first] > most:
                first += 1
        found.append(Context(first, text, ends[first], end))
    return found


def whole_text(members: Sequence[Member], rules: ReadingRules) -> tuple[int, ...]:
    """Return the tokens of a whole document, given its chunks in reading order: what overlaps stands there once."""
    pieces = [_left(before, after, rules.separator) for before, after in pairwise(members)]
    return tuple(token for piece in pieces for token in piece) + (members[-1].token_ids if members else ())


def _left(before: Member, after: Member, separator: tuple[int, ...]) -> tuple[int, ...]:
    shared = overlap(before.place, after.place)
    if not shared:
        return before.token_ids + separator
    end = before.place.length - shared
    # Of a chunk that begins no earlier than the next one nothing is left, nor of the words around its body.
    return before.token_ids[: bisect_right(before.place.ends, end)] if end > 0 else ()


def relinked(members: Iterable[Member], gone: Iterable[Member]) -> Iterator[tuple[str, str | None]]:
    """Yield the id and new predecessor of each of `members` whose predecessor is `gone`."""
    predecessors = {member.id: member.place.previous for member in gone}
    for member in members:
        previous = member.place.previous
        if previous in predecessors:
            seen = set()
            while previous in predecessors and previous not in seen:
                seen.add(previous)
                previous = predecessors[previous]
            yield member.id, None if previous in predecessors else previous
