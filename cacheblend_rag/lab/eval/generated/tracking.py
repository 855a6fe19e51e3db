"""Variable tracking, RULER's stand-in for following a reference over many steps."""

from __future__ import annotations

import random
from itertools import pairwise
from string import ascii_uppercase

from cacheblend_rag.lab.eval.generated.haystack import Haystack, Names, noise, place, random_depths
from cacheblend_rag.lab.eval.generated.packing import Puzzle, Unit

__all__ = ["tracking_puzzle"]

_HOPS = 4


def tracking_puzzle(rng: random.Random) -> Puzzle:
    """Draw a chain of assignments: a number to a variable, that to the next, four times (RULER: one chain, four hops)."""
    names = Names(rng)
    value = names.number(5)
    variables = [names.letters(5, ascii_uppercase) for _ in range(_HOPS + 1)]
    lines = [
        f"VAR {variables[0]} = {value}.",
        *(f"VAR {later} = VAR {earlier}." for earlier, later in pairwise(variables)),
    ]
    depths = sorted(random_depths(rng, len(lines)))
    haystack = Haystack(noise())
    return Puzzle(
        question=(
            f"Which variables have the value {value}, given to them directly or through another variable? Name all of them.\n"
            f"Answer: The variables with the value {value} are"
        ),
        answers=tuple(variables),
        build=lambda number: place(haystack.take(number), [[Unit(line)] for line in lines], depths),
    )
