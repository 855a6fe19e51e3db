"""Reading order of a document's chunks, and what stands before each of them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Ending", "Member", "Place", "end_before", "in_order", "overlap", "relinked"]

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


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of what stands before a chunk in its document, and the ids of the chunks that it is of."""

    token_ids: tuple[int, ...] = ()
    ids: tuple[str, ...] = ()


AnyMember = TypeVar("AnyMember", bound=Member)


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


def end_before(ordered: Sequence[Member], number: int, most: int, separator: tuple[int, ...]) -> Ending:
    """Return the end, `most` tokens, of the text before a chunk of a document, whose chunks are given in reading order.

    What the chunk itself begins with, because the two overlap, is not among it.
    """
    tokens: tuple[int, ...] = ()
    ids: list[str] = []
    while number and len(tokens) < most:
        number -= 1
        tokens = _left(ordered[number], ordered[number + 1], separator if tokens else ()) + tokens
        ids.append(ordered[number].id)
    return Ending(tokens[len(tokens) - most :] if len(tokens) > most else tokens, tuple(ids))


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
