"""A small fictional world: people and companies, what is true of them, and the documents that say so."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend_lab.reference.corpus import Document
from cacheblend_lab.training.templates import ATTRIBUTES, FILLERS, RELATIONS, statement_template
from cacheblend_lab.training.vocabulary import Maker, Split

__all__ = ["LINKED", "SHAREABLE", "SHARED", "Fact", "Style", "World", "build_world", "draw_pool", "draw_subjects"]


@dataclass(frozen=True)
class Style:
    """Richness of the drawn contexts; the stages of the curriculum are a list of these.

    Attributes
    ----------
    people, firms, facts
        Inclusive ranges: subjects of a context, and facts (= chunks) of each.
    attributes
        What may be said of people; everything may be said of companies.
    pool
        Inclusive range: how many of the attributes one context uses. A small pool lets people have the same attributes, so that
        only the subject tells their values apart.
    words_between
        How many words of a template stay between subject and value; None keeps all.
    answer_words
        The same of the answers to direct questions.
    variety
        Share of statements with an opener or a closer.
    pronouns
        Share of later chunks that do not name their subject.
    fillers
        Share of chunks with a second sentence.
    kinds
        Kinds of question asked.
    """

    people: tuple[int, int] = (3, 3)
    firms: tuple[int, int] = (1, 1)
    facts: tuple[int, int] = (3, 5)
    attributes: tuple[str, ...] = ("born", "lives", "employer", "trade", "pet", *RELATIONS)
    pool: tuple[int, int] = (4, 5)
    words_between: int | None = None
    answer_words: int | None = None
    variety: float = 0.6
    pronouns: float = 0.65
    fillers: float = 0.1
    kinds: tuple[str, ...] = ("single", "pronoun", "two_hop")


@dataclass(frozen=True)
class Fact:
    """`subject`'s `attribute` is `value`, as chunk `chunk` of the context says, naming the subject or not."""

    subject: str
    attribute: str
    value: str
    chunk: int
    names_subject: bool


@dataclass(frozen=True)
class World:
    """Documents, and the facts in them; chunks are numbered through all documents in order."""

    documents: tuple[Document, ...]
    facts: tuple[Fact, ...]

    @property
    def chunks(self) -> tuple[str, ...]:
        """The chunks of all documents in order."""
        return tuple(chunk for document in self.documents for chunk in document.chunks)


SHARED = 0.35
"""Chance, where comparisons are asked, that a value is shared with another person, so that "yes" is not rare."""

SHAREABLE = ("born", "lives", "employer")
"""Attributes whose values are."""

LINKED = 0.85
"""Chance that a document gets a fact that a two-hop question can start from."""


def build_world(rng: random.Random, style: Style, split: Split) -> World:
    """Draw the documents of one context."""
    maker = Maker(rng, split)
    people, firms, subjects = draw_subjects(rng, maker, style.people, style.firms)
    pool = draw_pool(rng, style.attributes, style.pool)
    documents: list[Document] = []
    facts: list[Fact] = []
    for name, of, pronoun in subjects:
        wanted = _attributes_of(rng, style, of, pool)
        chunks: list[str] = []
        for place, attribute in enumerate(wanted):
            value = _value(rng, maker, attribute, name, people, firms, facts if "comparison" in style.kinds else [])
            named = place == 0 or rng.random() >= style.pronouns
            chunks.append(_chunk(rng, style, split, attribute, name if named else pronoun, value))
            facts.append(Fact(name, attribute, value, sum(len(d.chunks) for d in documents) + place, named))
        documents.append(Document(name, tuple(chunks)))
    return World(tuple(documents), tuple(facts))


def draw_subjects(
    rng: random.Random, maker: Maker, people: tuple[int, int], firms: tuple[int, int]
) -> tuple[list[str], list[str], list[tuple[str, str, str]]]:
    """Draw whom a context is about: people, companies, and both as (name, "person" or "firm", pronoun) in any order."""
    persons = [maker.person() for _ in range(rng.randint(*people))]
    companies = [maker.value("firm") for _ in range(rng.randint(*firms))]
    pronouns = [rng.choice(("She", "He"))] if rng.random() < 0.5 else ["She", "He"]
    subjects = [(name, "person", rng.choice(pronouns)) for name in persons]
    subjects += [(name, "firm", "It") for name in companies]
    rng.shuffle(subjects)
    return persons, companies, subjects


def draw_pool(rng: random.Random, attributes: Sequence[str], sizes: tuple[int, int]) -> list[str]:
    """Draw the attributes of a context's people, one or two relations among them where there are any to choose from."""
    size = min(rng.randint(*sizes), len(attributes))
    relations = [name for name in attributes if name in RELATIONS]
    others = [name for name in attributes if name not in RELATIONS]
    chosen = rng.sample(relations, min(len(relations), rng.randint(1, 2)))
    return chosen + rng.sample(others, min(len(others), size - len(chosen)))


def _attributes_of(rng: random.Random, style: Style, of: str, pool: list[str]) -> list[str]:
    if of == "firm":
        allowed = [name for name, attribute in ATTRIBUTES.items() if attribute.of == "firm"]
        rng.shuffle(allowed)
        return allowed[: max(1, rng.randint(*style.facts))]
    allowed = list(pool)
    rng.shuffle(allowed)
    count = min(rng.randint(*style.facts), len(allowed))
    chosen, rest = allowed[:count], allowed[count:]
    links = [name for name in rest if name in RELATIONS]
    if count > 1 and links and not any(name in RELATIONS for name in chosen) and rng.random() < LINKED:
        chosen[-1] = rng.choice(links)
        rng.shuffle(chosen)
    # The opening chunk speaks of the subject alone: a second name there would make "she" ambiguous to a reader.
    for place, name in enumerate(chosen):
        if name not in RELATIONS:
            chosen[0], chosen[place] = chosen[place], chosen[0]
            break
    return chosen


def _value(
    rng: random.Random,
    maker: Maker,
    attribute: str,
    subject: str,
    people: list[str],
    firms: list[str],
    facts: list[Fact],
) -> str:
    others = [name for name in people if name != subject]
    if attribute in RELATIONS and others:
        return rng.choice(others)
    known = [fact.value for fact in facts if fact.attribute == attribute]
    if attribute in SHAREABLE and known and rng.random() < SHARED:
        return rng.choice(known)
    if attribute == "employer" and firms and rng.random() < LINKED:
        return rng.choice(firms)
    return maker.value(ATTRIBUTES[attribute].value_kind)


def _chunk(rng: random.Random, style: Style, split: Split, attribute: str, subject: str, value: str) -> str:
    opener, core, closer = statement_template(rng, attribute, split, plain=rng.random() >= style.variety)
    if style.words_between is not None:
        opener, closer = "", ""
        words = core.removeprefix("{S} ").removesuffix(" {V}").split()
        kept = words[max(0, len(words) - style.words_between) :] if style.words_between else []
        core = " ".join(["{S}", *kept, "{V}"])
    # After an opener the sentence goes on, so a pronoun is written small; a name is not.
    name = subject.lower() if opener and subject in ("She", "He", "It") else subject
    text = f"{opener}{core.format(S=name, V=value)}{closer}."
    if rng.random() < style.fillers:
        text = f"{text} {rng.choice(FILLERS)}"
    return text
