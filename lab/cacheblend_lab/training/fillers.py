"""Sentences that carry no fact: what stands between facts in a paragraph.

They are put together from parts, so that none is learnt by heart. None of their words is part of a value or of a name, nor a verb
that facts are stated with, so that looking for a fact never ends here.
"""

from __future__ import annotations

import random

__all__ = ["filler", "filler_parts", "notes"]

_TIMES = (
    "In the winter",
    "In the summer",
    "On cold evenings",
    "On quiet mornings",
    "Early in spring",
    "Late in autumn",
    "During the week",
    "Before sunrise",
    "Most Sundays",
    "After long rain",
    "Every now and then",
    "When nothing else happens",
)
_PLACES = (
    "harbour",
    "village square",
    "old mill",
    "railway station",
    "library",
    "church",
    "theatre",
    "museum",
    "school",
    "river bank",
    "forest path",
    "swimming pool",
)
_STATES = (
    "is almost empty",
    "lies in thick fog",
    "smells of wet leaves",
    "stays closed until noon",
    "fills with visitors",
    "is covered with snow",
    "seems quiet and cold",
    "draws a crowd from near and far",
    "gets a fresh coat of dust",
    "turns silent within minutes",
)
_SCENES = (
    "the wind blows from the hills",
    "the rain falls for hours",
    "bells ring in the distance",
    "children play until dusk",
    "the trees bend in the storm",
    "thunder wakes the whole street",
    "the last train leaves almost empty",
    "thick ice covers the river",
    "the sun hardly breaks through the clouds",
    "strangers ask the way to the sea",
)
_ADVERBS = ("", "often ", "rarely ", "sometimes ", "usually ", "seldom ")
_PERSON_HABITS = (
    "walks along the river",
    "gets up before the sun",
    "drinks tea with honey",
    "reads old novels",
    "takes the early train",
    "sings while cooking soup",
    "sleeps badly",
    "forgets an umbrella",
    "hums a simple song",
    "waits for the postman",
    "skips breakfast",
    "writes long diaries",
    "counts the stars",
    "plays chess with strangers",
    "wears a thick scarf",
    "bakes an apple cake",
    "sits by the open window",
    "swims in the cold sea",
    "feeds the birds on the roof",
    "misses the evening news",
)
_FIRM_HABITS = (
    "opens the doors before eight",
    "closes for two weeks",
    "replies to complaints politely",
    "pays the bills on time",
    "prints a catalogue",
    "hires students during the holidays",
    "sends parcels by train",
    "repairs broken things without charge",
    "celebrates every birthday",
    "hangs a new sign above the door",
    "offers visitors a cup of tea",
    "sweeps the yard before lunch",
)
_MANNERS = (
    "",
    "",
    "",
    " without any hurry",
    " with great patience",
    " for an hour or two",
    " as old friends remember",
    " and thinks nothing of the cost",
    " in spite of the weather",
    " with a quiet smile",
)
# Share of fillers that speak of the subject, and of these that begin with a time.
_ABOUT_SUBJECT = 0.6
_TIMED = 0.4


def filler(rng: random.Random, of: str) -> tuple[str, str]:
    """Draw a sentence about a person or a firm that carries no fact, without its full stop: how it opens, and the rest.

    In the rest, ``{S}`` stands for the subject where it speaks of it.
    """
    if rng.random() < _ABOUT_SUBJECT:
        opener = f"{rng.choice(_TIMES)}, " if rng.random() < _TIMED else ""
        habit = rng.choice(_PERSON_HABITS if of == "person" else _FIRM_HABITS)
        return opener, f"{{S}} {rng.choice(_ADVERBS)}{habit}{rng.choice(_MANNERS)}"
    if rng.random() < 0.5:
        return f"{rng.choice(_TIMES)}, ", f"the {rng.choice(_PLACES)} {rng.choice(_STATES)}"
    return f"{rng.choice(_TIMES)}, ", rng.choice(_SCENES)


def notes(rng: random.Random, count: int, words: int) -> list[str]:
    """Draw numbered texts of `words` words, each of fillers about a person of its own."""
    texts = []
    for number in range(count):
        said = [f"Note {number}."]
        while len(said) < words:
            opener, rest = filler(rng, "person")
            said += f"{opener}{rest}.".format(S=f"Person {number}").split()
        texts.append(" ".join(said[:words]))
    return texts


def filler_parts() -> tuple[str, ...]:
    """Return all that fillers are put together from."""
    return (*_TIMES, *_PLACES, *_STATES, *_SCENES, *_ADVERBS, *_PERSON_HABITS, *_FIRM_HABITS, *_MANNERS)
