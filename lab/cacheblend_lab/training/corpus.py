"""Contexts with questions, for training, for evaluation and for the demonstration; everything follows from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

from cacheblend_lab.reference.corpus import Document, Question
from cacheblend_lab.training.paragraphs import Paragraphs, build_paragraphs
from cacheblend_lab.training.questions import ContextStyle, ask, pick
from cacheblend_lab.training.sight import look
from cacheblend_lab.training.vocabulary import Split
from cacheblend_lab.training.world import Style, World, build_world

__all__ = [
    "EVAL_STYLE",
    "NOTES",
    "Document",
    "Example",
    "Question",
    "eval_examples",
    "make_example",
    "retrieved_order",
]


@dataclass(frozen=True)
class Example:
    """The chunks of one context, questions about them, and the documents that they are of while they stand in order."""

    chunks: tuple[str, ...]
    questions: tuple[Question, ...]
    documents: tuple[Document, ...] = ()


def make_example(
    rng: random.Random, style: ContextStyle, split: Split, max_questions: int, order: str = "reading"
) -> Example:
    """Draw one context and up to `max_questions` questions about it, of all kinds in turn as far as they go.

    Of chunks that were retrieved (`order`), only what a reader can know is asked (:mod:`.sight`).
    """
    while True:
        world = build_world(rng, style, split) if isinstance(style, Style) else build_paragraphs(rng, style, split)
        numbers = range(len(world.chunks)) if order == "reading" else retrieved_order(rng, world)
        fewest, most = (1, len(numbers)) if isinstance(style, Style) else style.total
        if fewest <= len(numbers) <= most:
            break
    sight = look(world, numbers)
    questions = pick(rng, ask(rng, sight, split, style), style.kinds, max_questions)
    return Example(sight.chunks, tuple(questions), world.documents if order == "reading" else ())


def retrieved_order(rng: random.Random, world: World) -> list[int]:
    """Draw which chunks were retrieved, by number: most of them, as they come or document by document."""
    share = rng.uniform(*_RETRIEVED)
    starts = accumulate((len(document.chunks) for document in world.documents), initial=0)
    documents = [
        [number for number in range(start, start + len(document.chunks)) if rng.random() < share]
        for start, document in zip(starts, world.documents, strict=False)
    ]
    rng.shuffle(documents)
    order = [number for numbers in documents for number in numbers]
    if rng.random() < _MIXED:
        rng.shuffle(order)
    return order


def eval_examples(
    num_questions: int,
    seed: int = 0,
    min_chunks: int = 10,
    style: ContextStyle | None = None,
    per_context: int = 8,
    order: str = "reading",
) -> list[Example]:
    """Return held-out examples with exactly `num_questions` questions in all.

    Names, values and templates of both statements and questions are none that training has seen.
    """
    rng = random.Random(f"eval:{seed}")
    examples: list[Example] = []
    missing = num_questions
    while missing > 0:
        example = make_example(rng, style or EVAL_STYLE, "held_out", min(missing, per_context), order)
        if len(example.chunks) >= min_chunks and example.questions:
            examples.append(example)
            missing -= len(example.questions)
    return examples


# Share of a world's chunks that are retrieved, from context to context; and of such contexts, those whose chunks are all mixed.
_RETRIEVED = (0.6, 1.0)
_MIXED = 0.5
EVAL_STYLE = Paragraphs()
"""Contexts of 10 to 20 paragraphs, about 1,000 to 2,100 tokens."""

NOTES = Style(people=(3, 3), firms=(0, 1), facts=(4, 5))
"""Contexts of 12 to 18 chunks of a sentence or two, whose people mostly share their attributes: about 300 tokens, soon read."""
