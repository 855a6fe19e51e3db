"""Templates that state facts and ask for them: attributes, sentence templates, and which templates are held out.

A statement is an opener, a core and a closer; a question is a core in one of several frames. Every part occurs in training, but
one combination in five occurs only in evaluation. Direct questions are all trained: their words stand in no other combination.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from cacheblend_lab.training.vocabulary import Split

__all__ = [
    "ATTRIBUTES",
    "COMPARISONS",
    "FILLERS",
    "RELATIONS",
    "Attribute",
    "Comparison",
    "question_template",
    "question_templates",
    "statement_template",
    "statement_templates",
]


@dataclass(frozen=True)
class Attribute:
    """One thing that can be said of a person or a company.

    Attributes
    ----------
    name
        Its key.
    value_kind
        What its values are (see :meth:`Maker.value`).
    of
        ``person`` or ``firm``.
    statements
        Sentence cores with ``{S}`` and ``{V}``.
    questions
        Question cores as pairs: the direct question, and the phrase for "Please tell me ...".
    answer
        The answer's sentence; its value always stands last.
    clause
        The words between "who" or "which" and the value in an answer that joins two facts.
    """

    name: str
    value_kind: str
    of: str
    statements: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    answer: str
    clause: str


def _relation(word: str) -> Attribute:
    return Attribute(
        word,
        "person",
        "person",
        (f"{{S}} has a {word} called {{V}}", f"{{S}} is the {word} of {{V}}", f"{{S}} has one {word}, namely {{V}}"),
        (
            (f"Who is the {word} of {{S}}?", f"who the {word} of {{S}} is"),
            (f"Which {word} does {{S}} have?", f"which {word} {{S}} has"),
            (f"What is the name of the {word} of {{S}}?", f"the name of the {word} of {{S}}"),
        ),
        f"The {word} of {{S}} is {{V}}.",
        f"has a {word} called",
    )


RELATIONS = ("cousin", "partner", "neighbour")
"""Attributes whose value is another person, so that a question can go through them."""

ATTRIBUTES: dict[str, Attribute] = {
    attribute.name: attribute
    for attribute in (
        Attribute(
            "born",
            "town",
            "person",
            ("{S} was born in {V}", "{S} came into the world in {V}", "{S} spent the first years of life in {V}"),
            (
                ("Where was {S} born?", "where {S} was born"),
                ("What is the birthplace of {S}?", "the birthplace of {S}"),
                ("In which town was {S} born?", "in which town {S} was born"),
            ),
            "{S} was born in {V}.",
            "was born in",
        ),
        Attribute(
            "lives",
            "town",
            "person",
            ("{S} lives in {V}", "{S} has a house in {V}", "{S} has settled down in {V}"),
            (
                ("Where does {S} live?", "where {S} lives"),
                ("What is the home of {S}?", "the home of {S}"),
                ("In which town does {S} live?", "in which town {S} lives"),
            ),
            "{S} lives in {V}.",
            "lives in",
        ),
        Attribute(
            "employer",
            "firm",
            "person",
            ("{S} works for {V}", "{S} is employed by {V}", "{S} earns a living at {V}"),
            (
                ("Who does {S} work for?", "who {S} works for"),
                ("What is the employer of {S}?", "the employer of {S}"),
                ("Which company employs {S}?", "which company employs {S}"),
            ),
            "{S} works for {V}.",
            "works for",
        ),
        Attribute(
            "trade",
            "trade",
            "person",
            ("{S} is a {V}", "{S} was trained as a {V}", "{S} is known as a good {V}"),
            (
                ("What is the trade of {S}?", "the trade of {S}"),
                ("Which trade did {S} learn?", "which trade {S} learned"),
                ("What kind of work does {S} do?", "what kind of work {S} does"),
            ),
            "{S} is a {V}.",
            "is a",
        ),
        Attribute(
            "pet",
            "animal",
            "person",
            ("{S} keeps a {V}", "{S} is the owner of a {V}", "{S} looks after a {V}"),
            (
                ("Which animal does {S} keep?", "which animal {S} keeps"),
                ("What is the pet of {S}?", "the pet of {S}"),
                ("What animal belongs to {S}?", "what animal belongs to {S}"),
            ),
            "{S} keeps a {V}.",
            "keeps a",
        ),
        *(_relation(word) for word in RELATIONS),
        Attribute(
            "base",
            "town",
            "firm",
            ("{S} is based in {V}", "{S} has an office in {V}", "{S} runs a workshop in {V}"),
            (
                ("Where is {S} based?", "where {S} is based"),
                ("What is the seat of {S}?", "the seat of {S}"),
                ("In which town is {S} based?", "in which town {S} is based"),
            ),
            "{S} is based in {V}.",
            "is based in",
        ),
        Attribute(
            "goods",
            "goods",
            "firm",
            ("{S} makes {V}", "{S} is known for {V}", "{S} earns money with {V}"),
            (
                ("What does {S} make?", "what {S} makes"),
                ("What are the goods of {S}?", "the goods of {S}"),
                ("Which goods does {S} sell?", "which goods {S} sells"),
            ),
            "{S} makes {V}.",
            "makes",
        ),
        Attribute(
            "founder",
            "person",
            "firm",
            ("{S} was founded by {V}", "{S} was started by {V}", "{S} owes a lot to {V}"),
            (
                ("Who founded {S}?", "who founded {S}"),
                ("Who is the founder of {S}?", "who the founder of {S} is"),
                ("Which person started {S}?", "which person started {S}"),
            ),
            "{S} was founded by {V}.",
            "was founded by",
        ),
    )
}


@dataclass(frozen=True)
class Comparison:
    """A question whether two people share a value: its question cores, with ``{A}`` and ``{B}``."""

    attribute: str
    questions: tuple[tuple[str, str], ...]


COMPARISONS: tuple[Comparison, ...] = tuple(
    Comparison(
        attribute,
        (
            (f"Do {{A}} and {{B}} {same}?", f"whether {{A}} and {{B}} {same}"),
            (f"Is it true that {{A}} and {{B}} {same}?", f"if it is true that {{A}} and {{B}} {same}"),
            (f"Do both {{A}} and {{B}} {same}?", f"whether both {{A}} and {{B}} {same}"),
        ),
    )
    for attribute, same in (
        ("lives", "live in the same town"),
        ("born", "come from the same town"),
        ("employer", "work for the same company"),
    )
)

_OPENERS = (
    "",
    "By all accounts, ",
    "As far as we know, ",
    "Most people agree that ",
    "According to the town records, ",
)
_CLOSERS = (
    "",
    ", which is no secret",
    ", and that has never changed",
    ", as everybody here can tell",
    ", though few people ask about it",
)
_FRAMES = (
    "{direct}",
    "Please tell me {phrase}.",
    "Can you say {phrase}?",
    "I would like to know {phrase}.",
    "Do you know {phrase}?",
    "Find out {phrase}.",
)
FILLERS = (
    "The story has been told many times.",
    "Nothing more was written down that day.",
    "There are good reasons for it.",
    "A letter from last year says the same.",
    "The local paper once wrote about this.",
    "It rained a lot in those years.",
)
"""Sentences without a fact, which make some chunks longer."""


@cache
def statement_templates(name: str, split: Split) -> tuple[tuple[str, str, str], ...]:
    """Return every (opener, core, closer) of an attribute in one split."""
    return tuple(
        (_OPENERS[opener], core, _CLOSERS[closer])
        for index, core in enumerate(ATTRIBUTES[name].statements)
        for opener in range(len(_OPENERS))
        for closer in range(len(_CLOSERS))
        if ((index + opener + closer) % 5 == 2) == (split == "held_out")
    )


@cache
def question_templates(cores: tuple[tuple[str, str], ...], split: Split) -> tuple[str, ...]:
    """Return every question of the given cores in one split."""
    return tuple(
        frame.format(direct=direct, phrase=phrase)
        for index, (direct, phrase) in enumerate(cores)
        for number, frame in enumerate(_FRAMES)
        if (number > 0 and (2 * index + number) % 5 == 0) == (split == "held_out")
    )


def statement_template(rng: random.Random, name: str, split: Split, plain: bool = False) -> tuple[str, str, str]:
    """Draw a statement template; `plain` ones have neither opener nor closer."""
    if plain:
        return "", rng.choice(ATTRIBUTES[name].statements), ""
    return rng.choice(statement_templates(name, split))


def question_template(rng: random.Random, cores: tuple[tuple[str, str], ...], split: Split) -> str:
    """Draw a question template."""
    return rng.choice(question_templates(cores, split))
