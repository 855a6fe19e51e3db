"""Reading order of a document's chunks, and what stands before each of them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Ending", "Member", "Place", "end_before", "in_order"]


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a chunk in its document."""

    document: str
    # Where the chunk's body begins in it, in characters; None where that is not known.
    start: int | None = None
    # Characters of its body, and for each of its tokens how many of them have ended with it; only with a `start`.
    length: int = 0
    ends: tuple[int, ...] = ()


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
    """Return a document's chunks in reading order, by where they start; those that do not say so come last."""
    return sorted(members, key=lambda member: math.inf if member.place.start is None else member.place.start)


def end_before(ordered: Sequence[Member], number: int, most: int, separator: tuple[int, ...]) -> Ending:
    """Return the end, `most` tokens, of the text before a chunk of a document, whose chunks are given in reading order."""
    tokens: tuple[int, ...] = ()
    ids: list[str] = []
    if ordered[number].place.start is None:
        return Ending()
    while number and len(tokens) < most:
        number -= 1
        tokens = _left(ordered[number], ordered[number + 1], separator if tokens else ()) + tokens
        ids.append(ordered[number].id)
    return Ending(tokens[len(tokens) - most :] if len(tokens) > most else tokens, tuple(ids))


def _left(before: Member, after: Member, separator: tuple[int, ...]) -> tuple[int, ...]:
    assert before.place.start is not None and after.place.start is not None
    left = after.place.start - before.place.start
    if left >= before.place.length:
        return before.token_ids + separator
    # Of a chunk that begins no earlier than the next one nothing is left, nor of the words around its body.
    return before.token_ids[: bisect_right(before.place.ends, left)] if left > 0 else ()
