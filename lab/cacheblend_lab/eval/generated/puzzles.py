"""Questions about generated texts: needles, chains of variables, and words that must be counted.

Needles are as RULER varies them, across a chunk border, or of the fictional world, which the reference model knows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, pairwise, repeat
from math import isqrt, pi
from string import ascii_lowercase, ascii_uppercase

from cacheblend_lab.eval.generated.haystack import (
    Haystack,
    Names,
    invented_words,
    noise,
    place,
    random_depths,
    stories,
)
from cacheblend_lab.eval.generated.packing import Puzzle, Unit
from cacheblend_lab.training.templates import ATTRIBUTES, RELATIONS, question_template
from cacheblend_lab.training.vocabulary import Maker

__all__ = [
    "NEEDLES",
    "NeedleSetting",
    "across_puzzle",
    "common_words_puzzle",
    "fact_puzzle",
    "frequent_words_puzzle",
    "needle_puzzle",
    "tracking_puzzle",
]

_NUMBER_DIGITS = 7


@dataclass(frozen=True, slots=True)
class NeedleSetting:
    """One variant of RULER's needle in a haystack.

    Attributes
    ----------
    haystack : str
        "noise", "stories", or "needles": the rest of the text is needles with other keys.
    keys : int
        How many different keys are hidden on purpose, the asked ones among them.
    values : int
        How many values each key has.
    asked : int
        How many keys are asked for.
    uuid_keys, uuid_values : bool
        Whether keys and values are UUIDs; otherwise a key is an adjective and a noun, and a value a number of seven digits.
    """

    haystack: str = "stories"
    keys: int = 1
    values: int = 1
    asked: int = 1
    uuid_keys: bool = False
    uuid_values: bool = False


NEEDLES: dict[str, NeedleSetting] = {
    "niah_single_1": NeedleSetting("noise"),
    "niah_single_2": NeedleSetting(),
    "niah_single_3": NeedleSetting(uuid_values=True),
    "niah_multikey_1": NeedleSetting(keys=4),
    "niah_multikey_2": NeedleSetting("needles"),
    "niah_multikey_3": NeedleSetting("needles", uuid_keys=True, uuid_values=True),
    "niah_multiquery": NeedleSetting(keys=4, asked=4),
    "niah_multivalue": NeedleSetting(values=4),
}
"""The variants by RULER's names, with the settings that RULER gives them."""


def needle_puzzle(rng: random.Random, setting: NeedleSetting, depths: Sequence[float] | None = None) -> Puzzle:
    """Draw one question about needles, at depths from 0 to 1; by default at different ones of 40, drawn by chance."""
    names = Names(rng)
    key = names.uuid if setting.uuid_keys else names.pair
    value = names.uuid if setting.uuid_values else lambda: names.number(_NUMBER_DIGITS)
    what = "code" if setting.uuid_values else "number"
    hidden = [(name, value()) for name in [key() for _ in range(setting.keys)] for _ in range(setting.values)]
    asked = list(dict(hidden))[: setting.asked]
    needles = [[Unit(_needle(what, *each))] for each in hidden]
    rng.shuffle(needles)
    if depths is None:
        depths = random_depths(rng, len(needles))
    haystack = Haystack(_haystack(setting.haystack, rng, what, key, value))
    several = len(asked) * setting.values > 1
    return Puzzle(
        question=_question(what, asked, several),
        answers=tuple(value for name, value in hidden if name in asked),
        build=lambda number: place(haystack.take(number), needles, depths),
    )


def across_puzzle(rng: random.Random, depths: Sequence[float] | None = None) -> Puzzle:
    """Draw a question whose key ends one chunk and whose value begins the next, after "It".

    Three other keys stand in the same way, so only what "It" refers to tells the values apart: KV of a chunk that was encoded
    alone does not know it. The first depth is the asked key's; by default they are as in `needle_puzzle`.
    """
    names = Names(rng)
    hidden = [(names.pair(), names.number(_NUMBER_DIGITS)) for _ in range(4)]
    needles = [
        [Unit(f"Here is the secret number of {key}.", ends_chunk=True), Unit(f"It is {value}.")]
        for key, value in hidden
    ]
    if depths is None:
        depths = random_depths(rng, len(needles))
    elif len(depths) < len(needles):
        depths = [*depths, *random_depths(rng, len(needles) - len(depths))]
    haystack = Haystack(stories(rng))
    key, value = hidden[0]
    return Puzzle(
        question=_question("number", [key], several=False),
        answers=(value,),
        build=lambda number: place(haystack.take(number), needles, depths),
    )


def _haystack(
    kind: str, rng: random.Random, what: str, key: Callable[[], str], value: Callable[[], str]
) -> Iterator[str]:
    if kind == "noise":
        return noise()
    if kind == "stories":
        return stories(rng)
    return iter(lambda: _needle(what, key(), value()), None)


def _needle(what: str, key: str, value: str) -> str:
    return f"A secret {what} of {key} is {value}."


def _question(what: str, keys: Sequence[str], several: bool) -> str:
    named = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"
    if several:
        return (
            f"What are all the secret {what}s of {named} that the text mentions?\n"
            f"Answer: The secret {what}s of {named} are"
        )
    return f"What is the secret {what} of {named} that the text mentions?\nAnswer: The secret {what} of {named} is"


def fact_puzzle(rng: random.Random, depth: float, across: bool) -> Puzzle:
    """Draw a person of whom two sentences tell, in the fictional world's own words; the second is asked for.

    With `across`, a chunk border stands between them and the second says only "She" or "He".
    """
    maker = Maker(rng, "held_out")
    person = maker.person()
    known, asked = rng.sample(
        [each for each in ATTRIBUTES.values() if each.of == "person" and each.name not in RELATIONS], 2
    )
    values = [maker.value(attribute.value_kind) for attribute in (known, asked)]
    names = [person, rng.choice(("She", "He")) if across else person]
    first, second = (
        rng.choice(attribute.statements).format(S=name, V=value) + "."
        for attribute, name, value in zip((known, asked), names, values, strict=True)
    )
    needle = [Unit(first, ends_chunk=across), Unit(second)]
    # Nothing else may be told of the person.
    haystack = Haystack(sentence for sentence in stories(rng) if person not in sentence)
    return Puzzle(
        question=question_template(rng, asked.questions, "held_out").format(S=person),
        answers=(values[1],),
        build=lambda number: place(haystack.take(number), [needle], [depth]),
    )


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
