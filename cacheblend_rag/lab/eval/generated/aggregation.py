"""Words that must be counted over the whole text: RULER's common and frequent words extraction."""

from __future__ import annotations

import random
from itertools import chain, count, islice, repeat
from math import isqrt, pi
from string import ascii_lowercase

from cacheblend_rag.lab.eval.generated.haystack import Names, invented_words
from cacheblend_rag.lab.eval.generated.packing import Puzzle, Unit

__all__ = ["common_words_puzzle", "frequent_words_puzzle"]

_COMMON = 10
_COMMON_TIMES = 30
_TIMES_RARER = 10
_FREQUENT = 3
_CODED_LETTERS = 6
_DOTS = "..."


def common_words_puzzle(rng: random.Random) -> Puzzle:
    """Draw a numbered list in which ten words stand 30 times each and others 3 times, as RULER has it.

    In a short context the ten take half of the list, and the others stand a tenth as often, or once.
    """
    words = rng.sample(invented_words(), len(invented_words()))
    common, others = words[:_COMMON], words[_COMMON:]
    seed = rng.random()

    def build(number: int) -> list[Unit]:
        times = min(_COMMON_TIMES, number // (2 * _COMMON))
        rarer = max(1, times // _TIMES_RARER)
        # A text that uses up all words repeats them all once more, still rarer than the common ones.
        filling = chain.from_iterable(chain.from_iterable(repeat(word, rarer) for word in others) for _ in count())
        listed = [*(word for word in common for _ in range(times)), *islice(filling, number - times * _COMMON)]
        random.Random(seed).shuffle(listed)
        return [Unit(f"{place}. {word}") for place, word in enumerate(listed, 1)]

    return Puzzle(
        question=(
            f"Which {_COMMON} words stand most often in the numbered list above?\n"
            f"Answer: The {_COMMON} words that stand most often in the list are"
        ),
        answers=tuple(common),
        build=build,
        least=2 * _COMMON * 3,
    )


def frequent_words_puzzle(rng: random.Random) -> Puzzle:
    """Draw a text of coded words whose counts fall off with the square of their rank (RULER's zeta distribution, alpha 2).

    The most frequent are dots, which the question tells to ignore; the next three are asked for.
    """
    names = Names(rng)
    coded = [names.letters(_CODED_LETTERS, ascii_lowercase) for _ in range(_FREQUENT)]
    seed = rng.random()

    def build(number: int) -> list[Unit]:
        # The share of rank k is 1 / (k^2 zeta(2)); ranks that would stand less than once are left to the dots.
        per_rank = 6 * number / pi**2
        last = isqrt(int(per_rank))
        while len(coded) < last - 1:
            coded.append(names.letters(_CODED_LETTERS, ascii_lowercase))
        listed = [coded[rank - 2] for rank in range(2, last + 1) for _ in range(int(per_rank / rank**2))]
        listed += [_DOTS] * (number - len(listed))
        random.Random(seed).shuffle(listed)
        return [Unit(word) for word in listed]

    return Puzzle(
        question=(
            "The text is coded; its dots mean nothing. Which three coded words stand most often in it?\n"
            "Answer: The three coded words that stand most often are"
        ),
        answers=tuple(coded[:_FREQUENT]),
        build=build,
        # From here on the fourth rank always stands more often than the fifth.
        least=60,
    )
