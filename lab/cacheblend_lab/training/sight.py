"""Knowledge that a reader has of some chunks, in the order in which they stand.

The training must teach neither to guess nor to refuse what only the whole document tells. So whatever may be asked is known,
absent, or neither, and what is neither is not asked.

- A chunk that only says "She" leans on the chunk right before it in the prompt. It is **told** whom it is about if that one is
  of the same document and names its subject or is told itself. Otherwise it is **untold**: nothing in the prompt says whom it
  is about, though a reader may well take it to go on about the person named last.
- A fact is **known** if its chunk names its subject or is told, unless an untold chunk would be read as stating the same
  attribute of the same subject.
- An attribute of a subject is **absent** if no chunk states it of the subject, and no untold chunk states it of any subject. Of
  relations, which hold both ways, a chunk that states one end states the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cacheblend_lab.training.templates import RELATIONS
from cacheblend_lab.training.world import Fact, World

__all__ = ["Sight", "look"]


@dataclass(frozen=True)
class Sight:
    """Knowledge from a prompt's chunks.

    Attributes
    ----------
    chunks
        The chunks, in the prompt's order.
    known
        The facts that a reader can know; their chunks are numbered in the prompt's order.
    naming
        For each chunk with known facts, the one that names its subject; itself, where it does.
    stated
        All (subject, attribute) that the chunks state, known or not.
    untold
        Attributes that an untold chunk states, of an unknown subject.
    """

    chunks: tuple[str, ...]
    known: tuple[Fact, ...]
    naming: dict[int, int]
    stated: frozenset[tuple[str, str]]
    untold: frozenset[str]

    def is_absent(self, subject: str, attribute: str) -> bool:
        """Return whether a reader can tell that the chunks do not say this of the subject."""
        return (subject, attribute) not in self.stated and attribute not in self.untold


def look(world: World, order: Sequence[int]) -> Sight:
    """Return what can be known from some of a world's chunks, given by number in the prompt's order."""
    texts = world.chunks
    facts_in: dict[int, list[Fact]] = {}
    for fact in world.facts:
        facts_in.setdefault(fact.chunk, []).append(fact)
    naming: dict[int, int] = {}
    stated: set[tuple[str, str]] = set()
    untold: set[str] = set()
    misread: set[tuple[str, str]] = set()
    before, named_last = "", ""
    for place, number in enumerate(order):
        facts = facts_in[number]
        subject = facts[0].subject
        if facts[0].names_subject:
            naming[place] = place
            named_last = subject
        elif subject == before and place - 1 in naming:
            naming[place] = naming[place - 1]
        else:
            untold.update(fact.attribute for fact in facts)
            misread.update((named_last, fact.attribute) for fact in facts)
        for fact in facts:
            stated.add((subject, fact.attribute))
            if fact.attribute in RELATIONS:
                stated.add((fact.value, fact.attribute))
        before = subject
    known = tuple(
        replace(fact, chunk=place)
        for place, number in enumerate(order)
        if place in naming
        for fact in facts_in[number]
        if (fact.subject, fact.attribute) not in misread
    )
    return Sight(tuple(texts[number] for number in order), known, naming, frozenset(stated), frozenset(untold))
