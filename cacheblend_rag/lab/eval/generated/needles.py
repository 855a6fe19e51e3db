"""Needles in a haystack, as RULER varies them, and one that stands across a chunk border."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cacheblend_rag.lab.eval.generated.haystack import Haystack, Names, noise, place, random_depths, stories
from cacheblend_rag.lab.eval.generated.packing import Puzzle, Unit

__all__ = ["NEEDLES", "NeedleSetting", "across_puzzle", "needle_puzzle"]

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
    """Draw one question about needles.

    Parameters
    ----------
    rng
        The source of chance.
    setting : NeedleSetting
        Which variant.
    depths : sequence of float, optional
        Where each needle stands, from 0 to 1; by default at different ones of 40 depths, drawn by chance.

    Returns
    -------
    Puzzle
        The question and its text.
    """
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
    """Draw a question whose key ends one chunk and whose value begins the next, behind "It".

    Three other keys stand in the same way, so only what "It" refers to tells the values apart: KV of a chunk that was encoded
    alone does not know it.

    Parameters
    ----------
    rng
        The source of chance.
    depths : sequence of float, optional
        Where the asked key stands, from 0 to 1, then each other one; by default as in `needle_puzzle`.

    Returns
    -------
    Puzzle
        The question and its text.
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
