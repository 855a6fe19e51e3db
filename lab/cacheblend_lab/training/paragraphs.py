"""Documents in paragraphs: chunks of many sentences, few of which carry a fact."""

from __future__ import annotations

import random
from dataclasses import dataclass

from cacheblend_lab.reference.corpus import Document
from cacheblend_lab.training.fillers import filler
from cacheblend_lab.training.templates import ATTRIBUTES, RELATIONS, statement_template
from cacheblend_lab.training.vocabulary import Maker, Split
from cacheblend_lab.training.world import LINKED, SHAREABLE, SHARED, Fact, World, draw_pool, draw_subjects

__all__ = ["ORDERS", "Paragraphs", "build_paragraphs"]

ORDERS = ("reading", "retrieved")
"""Orders of a context's chunks: whole documents in reading order; or some of the chunks, as a retriever ranks or finds them."""


@dataclass(frozen=True)
class Paragraphs:
    """Settings of drawn contexts of paragraphs; the defaults are those of the last stage of training and of the evaluation.

    Attributes
    ----------
    people, firms
        Inclusive ranges: subjects of a context.
    chunks
        Inclusive range: chunks of a document. One of a company has no more than there are things to say of it.
    facts
        Inclusive range: facts of a chunk.
    words
        Inclusive range: words of a chunk. A word is about 1.3 tokens, with names and punctuation.
    total
        Inclusive range: chunks of a context.
    attributes, pool
        As in :class:`Style`.
    variety
        Share of statements with an opener or a closer.
    named
        Share of later chunks that name their subject.
    kinds
        Kinds of question asked.
    orders
        Those of :data:`ORDERS` that contexts have, in equal shares.
    """

    people: tuple[int, int] = (3, 5)
    firms: tuple[int, int] = (1, 1)
    chunks: tuple[int, int] = (2, 5)
    facts: tuple[int, int] = (1, 3)
    words: tuple[int, int] = (56, 112)
    total: tuple[int, int] = (10, 20)
    attributes: tuple[str, ...] = ("born", "lives", "employer", "trade", "pet", *RELATIONS)
    pool: tuple[int, int] = (5, 7)
    variety: float = 0.6
    named: float = 0.3
    kinds: tuple[str, ...] = ("single", "pronoun", "two_hop", "comparison", "unanswerable")
    orders: tuple[str, ...] = ORDERS


# Share of the sentences after the first, in a chunk that names its subject, that name it again.
_NAMED_AGAIN = 0.15
# Words of one more filler, about: a chunk that has room for less is long enough.
_FILLER_WORDS = 8


def build_paragraphs(rng: random.Random, style: Paragraphs, split: Split) -> World:
    """Draw the documents of one context."""
    maker = Maker(rng, split)
    people, firms, subjects = draw_subjects(rng, maker, style.people, style.firms)
    pool = draw_pool(rng, style.attributes, style.pool)
    documents: list[Document] = []
    facts: list[Fact] = []
    for name, of, pronoun in subjects:
        allowed = pool if of == "person" else [key for key, attribute in ATTRIBUTES.items() if attribute.of == "firm"]
        chunks: list[str] = []
        for place, attributes in enumerate(_divided(rng, style, allowed)):
            number = sum(len(document.chunks) for document in documents) + place
            named = place == 0 or rng.random() < style.named
            stated = []
            for attribute in attributes:
                value = _value(rng, maker, attribute, name, people, firms, facts)
                stated.append((attribute, value))
                facts.append(Fact(name, attribute, value, number, named))
            chunks.append(_chunk(rng, style, split, of, name if named else pronoun, pronoun, stated))
        documents.append(Document(name, tuple(chunks)))
    return World(tuple(documents), tuple(facts))


def _divided(rng: random.Random, style: Paragraphs, allowed: list[str]) -> list[list[str]]:
    """Draw what is said of a subject, chunk by chunk; in the first of it, no other person if there is anything else to say."""
    fewest, most = style.facts
    count = min(rng.randint(*style.chunks), len(allowed) // fewest)
    total = rng.randint(count * fewest, min(count * most, len(allowed)))
    sizes = [fewest] * count
    while sum(sizes) < total:
        place = rng.randrange(count)
        if sizes[place] < most:
            sizes[place] += 1
    chosen = rng.sample(allowed, total)
    # A second name in the opening chunk would make "she" ambiguous to a reader.
    alone = [name for name in chosen if ATTRIBUTES[name].value_kind != "person"]
    opening = alone[: sizes[0]]
    rest = [name for name in chosen if name not in opening]
    opening += rest[: sizes[0] - len(opening)]
    rest = [name for name in chosen if name not in opening]
    rows = [opening]
    for size in sizes[1:]:
        rows.append(rest[:size])
        rest = rest[size:]
    return rows


def _value(
    rng: random.Random,
    maker: Maker,
    attribute: str,
    subject: str,
    people: list[str],
    firms: list[str],
    facts: list[Fact],
) -> str:
    known = [fact for fact in facts if fact.attribute == attribute]
    if attribute in RELATIONS:
        # Neighbours are each other's, and no person has two: a question for a person's neighbour has one answer.
        partners = {fact.value: fact.subject for fact in known}
        taken = {*partners, *partners.values(), subject}
        free = [name for name in people if name not in taken]
        return partners.get(subject) or (rng.choice(free) if free else maker.person())
    if attribute in SHAREABLE and known and rng.random() < SHARED:
        return rng.choice(known).value
    if attribute == "employer" and firms and rng.random() < LINKED:
        return rng.choice(firms)
    return maker.value(ATTRIBUTES[attribute].value_kind)


def _chunk(
    rng: random.Random,
    style: Paragraphs,
    split: Split,
    of: str,
    first: str,
    pronoun: str,
    stated: list[tuple[str, str]],
) -> str:
    """Write a chunk: its first sentence about the subject calls it `first`, the others mostly by the pronoun."""
    sentences: list[tuple[str, str]] = []
    for attribute, value in stated:
        opener, core, closer = statement_template(rng, attribute, split, plain=rng.random() >= style.variety)
        sentences.append((opener, core.replace("{V}", value) + closer))
    words = sum(len(f"{opener}{rest}".split()) for opener, rest in sentences)
    wanted = rng.randint(*style.words)
    while words + _FILLER_WORDS <= wanted:
        sentences.append(filler(rng, of))
        words += len("".join(sentences[-1]).split())
    rng.shuffle(sentences)
    texts = []
    subject = first
    for opener, rest in sentences:
        # After an opener the sentence goes on, so a pronoun is written small; a name is not.
        name = subject.lower() if opener and subject == pronoun else subject
        texts.append(f"{opener}{rest.format(S=name)}.")
        if "{S}" in rest:
            subject = first if rng.random() < _NAMED_AGAIN else pronoun
    return " ".join(texts)
