"""Contexts with questions, for training, for evaluation and for the demonstration; everything follows from a seed."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace

from cacheblend_rag.demo.corpus import CORPUS_FILE, Document, Question
from cacheblend_rag.lab.training.templates import ATTRIBUTES, COMPARISONS, RELATIONS, question_template
from cacheblend_rag.lab.training.vocabulary import Split
from cacheblend_rag.lab.training.world import Fact, Style, World, build_world

__all__ = [
    "EVAL_STYLE",
    "KINDS",
    "Document",
    "Example",
    "Question",
    "demo_corpus",
    "eval_examples",
    "make_example",
    "shuffle_example",
]

KINDS = ("single", "pronoun", "two_hop", "comparison")
"""Every kind of question there is. Which of them a context asks is :attr:`Style.kinds`; comparisons only where told to."""


@dataclass(frozen=True)
class Example:
    """The chunks of one context, questions about them, and the documents that they are of while they stand in order."""

    chunks: tuple[str, ...]
    questions: tuple[Question, ...]
    documents: tuple[Document, ...] = ()


def make_example(rng: random.Random, style: Style, split: Split, max_questions: int) -> Example:
    """Draw one context and up to `max_questions` questions about it, of all kinds in turn as far as they go."""
    world = build_world(rng, style, split)
    questions = _pick(rng, _questions(rng, world, split, style), style.kinds, max_questions)
    return Example(world.chunks, tuple(questions), world.documents)


def shuffle_example(rng: random.Random, example: Example) -> Example:
    """Return an example with its chunks in random order."""
    order = rng.sample(range(len(example.chunks)), len(example.chunks))
    place = {number: at for at, number in enumerate(order)}
    return Example(
        tuple(example.chunks[number] for number in order),
        tuple(
            replace(
                question,
                support=tuple(sorted(place[number] for number in question.support)),
                source=place[question.source],
            )
            for question in example.questions
        ),
    )


def eval_examples(
    num_questions: int, seed: int = 0, min_chunks: int = 12, style: Style | None = None, per_context: int = 8
) -> list[Example]:
    """Return held-out examples with exactly `num_questions` questions in all.

    Names, values and templates of both statements and questions are none that training has seen.

    Parameters
    ----------
    num_questions
        How many questions the examples have together.
    seed
        The examples follow from it.
    min_chunks
        Contexts with fewer chunks are not used.
    style
        How rich the contexts are; by default three people and up to one company.
    per_context
        Most questions of one example.
    """
    rng = random.Random(f"eval:{seed}")
    examples: list[Example] = []
    missing = num_questions
    while missing > 0:
        example = make_example(rng, style or EVAL_STYLE, "held_out", min(missing, per_context))
        if len(example.chunks) >= min_chunks and example.questions:
            examples.append(example)
            missing -= len(example.questions)
    return examples


EVAL_STYLE = Style(people=(3, 3), firms=(0, 1), facts=(4, 5))
"""Contexts of 12 to 18 chunks, whose people mostly share their attributes."""

_DEMO_SEED = 20
_DEMO_STYLE = Style(people=(7, 7), firms=(3, 3), facts=(5, 5), pool=(8, 8))


def demo_corpus() -> str:
    """Return the file of the demonstration's ten documents and all questions about them, always the same."""
    world = build_world(random.Random(f"demo:{_DEMO_SEED}"), _DEMO_STYLE, "held_out")
    rng = random.Random(f"demo-questions:{_DEMO_SEED}")
    questions = _questions(rng, world, "held_out", EVAL_STYLE)
    picked = _pick(rng, questions, EVAL_STYLE.kinds, len(questions))
    parts = {"documents": map(asdict, world.documents), "questions": map(asdict, picked)}
    # One a line, for people to read and for changes to be seen.
    lists = (f'"{name}": [\n' + ",\n".join(map(json.dumps, part)) for name, part in parts.items())
    return "{" + "\n], ".join(lists) + "\n]}\n"


def _pick(rng: random.Random, questions: list[Question], kinds: tuple[str, ...], count: int) -> list[Question]:
    pools = []
    for kind in kinds:
        pool = [question for question in questions if question.kind == kind]
        rng.shuffle(pool)
        pools.append(pool)
    rng.shuffle(pools)
    picked: list[Question] = []
    while len(picked) < count and any(pools):
        for pool in pools:
            if pool and len(picked) < count:
                picked.append(pool.pop())
    return picked


def _questions(rng: random.Random, world: World, split: Split, style: Style) -> list[Question]:
    facts = {(fact.subject, fact.attribute): fact for fact in world.facts}
    naming = {fact.chunk: _naming_chunk(world, fact) for fact in world.facts}
    questions: list[Question] = []
    for fact in world.facts:
        questions.append(_direct(rng, fact, naming[fact.chunk], split, style))
        questions.extend(_joins(rng, fact, facts, naming, split, style.brief))
    questions.extend(_comparisons(rng, facts, naming, split))
    return [question for question in questions if question.kind in style.kinds]


def _naming_chunk(world: World, fact: Fact) -> int:
    if fact.names_subject:
        return fact.chunk
    return max(f.chunk for f in world.facts if f.subject == fact.subject and f.names_subject and f.chunk < fact.chunk)


def _support(facts: list[Fact], naming: dict[int, int]) -> tuple[int, ...]:
    return tuple(sorted({chunk for fact in facts for chunk in (fact.chunk, naming[fact.chunk])}))


def _ask(rng: random.Random, cores: tuple[tuple[str, str], ...], split: Split, **names: str) -> str:
    return question_template(rng, cores, split).format(**names)


def _direct(rng: random.Random, fact: Fact, naming: int, split: Split, style: Style) -> Question:
    return Question(
        _ask(rng, ATTRIBUTES[fact.attribute].questions, split, S=fact.subject),
        fact.value,
        _answer(fact, style),
        "single" if fact.names_subject else "pronoun",
        tuple(sorted({fact.chunk, naming})),
        fact.chunk,
    )


def _answer(fact: Fact, style: Style) -> str:
    attribute = ATTRIBUTES[fact.attribute]
    if style.brief:
        return f"{fact.value}."
    if style.answer_words is None:
        return attribute.answer.format(S=fact.subject, V=fact.value)
    words = attribute.clause.split()
    kept = words[max(0, len(words) - style.answer_words) :]
    return " ".join([fact.subject, *kept, fact.value]) + "."


def _joins(
    rng: random.Random,
    first: Fact,
    facts: dict[tuple[str, str], Fact],
    naming: dict[int, int],
    split: Split,
    brief: bool,
) -> list[Question]:
    if first.attribute not in (*RELATIONS, "employer"):
        return []
    bridge = f"the {first.attribute} of {first.subject}"
    pronoun = "which" if first.attribute == "employer" else "who"
    lead = ATTRIBUTES[first.attribute].answer.format(S=first.subject, V=first.value).removesuffix(".")
    questions = []
    for second in facts.values():
        if second.subject != first.value or second.value == first.subject:
            continue
        attribute = ATTRIBUTES[second.attribute]
        questions.append(
            Question(
                _ask(rng, attribute.questions, split, S=bridge),
                second.value,
                f"{first.value if brief else lead + ', ' + pronoun} {attribute.clause} {second.value}.",
                "two_hop",
                _support([first, second], naming),
                second.chunk,
            )
        )
    return questions


def _comparisons(
    rng: random.Random, facts: dict[tuple[str, str], Fact], naming: dict[int, int], split: Split
) -> list[Question]:
    questions = []
    for comparison in COMPARISONS:
        known = [fact for fact in facts.values() if fact.attribute == comparison.attribute]
        for one in known:
            for other in known:
                if one.subject == other.subject:
                    continue
                verdict = "yes" if one.value == other.value else "no"
                clause = ATTRIBUTES[comparison.attribute].clause
                questions.append(
                    Question(
                        _ask(rng, comparison.questions, split, A=one.subject, B=other.subject),
                        verdict,
                        f"{one.subject} {clause} {one.value} and {other.subject} {clause} {other.value}, so {verdict}.",
                        "comparison",
                        _support([one, other], naming),
                        max(one.chunk, other.chunk),
                    )
                )
    return questions


if __name__ == "__main__":
    CORPUS_FILE.write_text(demo_corpus(), encoding="utf-8")
