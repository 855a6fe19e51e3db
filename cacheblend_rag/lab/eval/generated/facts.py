"""A needle that the reference model can find: what one person does, among what many others do."""

from __future__ import annotations

import random

from cacheblend_rag.lab.eval.generated.haystack import Haystack, place, stories
from cacheblend_rag.lab.eval.generated.packing import Puzzle, Unit
from cacheblend_rag.lab.training.templates import ATTRIBUTES, RELATIONS, question_template
from cacheblend_rag.lab.training.vocabulary import Maker

__all__ = ["fact_puzzle"]


def fact_puzzle(rng: random.Random, depth: float, across: bool) -> Puzzle:
    """Draw a person of whom two sentences tell, in the fictional world's own words; the second is asked for.

    Parameters
    ----------
    rng
        The source of chance.
    depth : float
        Where the two sentences stand, from 0 to 1.
    across : bool
        Whether a chunk border stands between them and the second says only "She" or "He".

    Returns
    -------
    Puzzle
        The question and its text.
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
