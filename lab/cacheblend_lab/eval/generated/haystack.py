"""Texts that hide needles: one tune repeated, stories of the fictional world, or other needles; and words for all of them."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import cycle, islice

from cacheblend_lab.eval.generated.packing import Unit
from cacheblend_lab.training.vocabulary import HEADS_AND_TAILS, PLAIN_PAIRS
from cacheblend_lab.training.world import Style, build_world

__all__ = ["Haystack", "Names", "invented_words", "noise", "place", "random_depths", "stories"]

_TUNE = (
    "The road is long.",
    "The sea is calm.",
    "The door is open.",
    "We walk on.",
    "Then we turn round and come home.",
)
_DEPTHS = 40
_STYLE = Style(people=(2, 4), firms=(0, 2), fillers=0.25)


class Haystack:
    """Sentences without end, of which any number can be taken; always the same ones."""

    def __init__(self, sentences: Iterator[str]) -> None:
        self._sentences = sentences
        self._drawn: list[Unit] = []

    def take(self, number: int) -> list[Unit]:
        """Return the first `number` sentences."""
        self._drawn.extend(Unit(text) for text in islice(self._sentences, max(0, number - len(self._drawn))))
        return self._drawn[:number]


def noise() -> Iterator[str]:
    """Return the same few sentences again and again (RULER's "repeat" haystack, in words of our own)."""
    return cycle(_TUNE)


def stories(rng: random.Random) -> Iterator[str]:
    """Yield, sentence by sentence, what is told of ever new people and companies: they stand for RULER's essays."""
    while True:
        for chunk in build_world(rng, _STYLE, "held_out").chunks:
            yield from (f"{sentence.removesuffix('.')}." for sentence in chunk.split(". "))


def place(haystack: Sequence[Unit], needles: Sequence[Sequence[Unit]], depths: Sequence[float]) -> list[Unit]:
    """Put groups of units, each of which stays together, at depths from 0 (before the text) to 1 (after it) of its characters."""
    ends = [0]
    for unit in haystack:
        ends.append(ends[-1] + len(unit.text) + 1)
    spots = [min(range(len(ends)), key=lambda spot: abs(ends[spot] - depth * ends[-1])) for depth in depths]
    units: list[Unit] = []
    done = 0
    for spot, needle in sorted(zip(spots, needles, strict=True), key=lambda pair: pair[0]):
        units += [*haystack[done:spot], *needle]
        done = spot
    return [*units, *haystack[done:]]


def random_depths(rng: random.Random, number: int) -> list[float]:
    """Draw `number` different ones of RULER's 40 depths, which are evenly spaced from 0 to 1."""
    return [depth / (_DEPTHS - 1) for depth in rng.sample(range(_DEPTHS), number)]


class Names:
    """Draws keys and values, none of them twice."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._used: set[str] = set()

    def pair(self) -> str:
        """Return an adjective and a noun, as in "lazy-turtle"; with a second adjective once most pairs are used."""
        firsts, seconds = _pairs()
        more = 0 if 2 * len(self._used) < len(firsts) * len(seconds) else 1
        draw = self._rng.choice
        return self._fresh(lambda: "-".join([*(draw(firsts) for _ in range(1 + more)), draw(seconds)]))

    def number(self, digits: int) -> str:
        """Return a number of `digits` digits, the first not 0."""
        return self._fresh(lambda: str(self._rng.randrange(10 ** (digits - 1), 10**digits)))

    def uuid(self) -> str:
        """Return a UUID of version 4."""
        return self._fresh(lambda: str(uuid.UUID(int=self._rng.getrandbits(128), version=4)))

    def letters(self, number: int, alphabet: str) -> str:
        """Return a word of `number` random letters."""
        return self._fresh(lambda: "".join(self._rng.choices(alphabet, k=number)))

    def _fresh(self, draw: Callable[[], str]) -> str:
        while True:
            name = draw()
            if name not in self._used:
                self._used.add(name)
                return name


@cache
def _pairs() -> tuple[tuple[str, ...], tuple[str, ...]]:
    firsts = dict.fromkeys(word for parts, _ in PLAIN_PAIRS.values() for word in parts)
    seconds = dict.fromkeys(word for _, parts in PLAIN_PAIRS.values() for word in parts)
    return tuple(firsts), tuple(seconds)


@cache
def invented_words() -> tuple[str, ...]:
    """Return a few thousand words made of two syllables, none of which stands inside another."""
    heads = dict.fromkeys(head.lower() for parts, _ in HEADS_AND_TAILS.values() for head in parts)
    tails = dict.fromkeys(tail for _, parts in HEADS_AND_TAILS.values() for tail in parts)
    words = dict.fromkeys(head + tail for head in heads for tail in tails)
    inside = {
        word[start:end]
        for word in words
        for start in range(len(word))
        for end in range(start + 1, len(word) + 1)
        if end - start < len(word)
    }
    return tuple(word for word in words if word not in inside)
