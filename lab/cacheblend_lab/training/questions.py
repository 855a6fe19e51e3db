"""Questions about what is in sight of a reader, with their answers."""

from __future__ import annotations

import random

from cacheblend_lab.reference.corpus import Question
from cacheblend_lab.training.paragraphs import Paragraphs
from cacheblend_lab.training.sight import Sight
from cacheblend_lab.training.templates import ATTRIBUTES, COMPARISONS, RELATIONS, Attribute, question_template
from cacheblend_lab.training.vocabulary import Maker, Split
from cacheblend_lab.training.world import Fact, Style

__all__ = ["KINDS", "NOT_STATED", "ContextStyle", "ask", "compared", "pick"]

KINDS = ("single", "pronoun", "two_hop", "comparison", "unanswerable")
"""Every kind of question there is. Which of them a context asks is its style's `kinds`."""

NOT_STATED = "The context does not say."
"""End of the answer to an unanswerable question, where the value would stand."""

ContextStyle = Style | Paragraphs
"""Styles in which contexts are drawn: chunks of a sentence or two, or paragraphs."""

# Questions about what is not said of those who are named: few of very many, or refusing would be what is asked for most.
_MOST_ABSENT = 6


def pick(rng: random.Random, questions: list[Question], kinds: tuple[str, ...], count: int) -> list[Question]:
    """Draw up to `count` questions, of all kinds in turn as far as they go."""
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


def ask(rng: random.Random, sight: Sight, split: Split, style: ContextStyle) -> list[Question]:
    """Return all questions of the style's kinds that can be asked about what is in sight, each in words of its own."""
    facts = {(fact.subject, fact.attribute): fact for fact in sight.known}
    naming = sight.naming
    questions: list[Question] = []
    answer_words = style.answer_words if isinstance(style, Style) else None
    for fact in sight.known:
        questions.append(_direct(rng, fact, naming[fact.chunk], split, answer_words))
        questions.extend(_joins(rng, fact, facts, naming, split))
    comparisons = _comparisons(rng, facts, naming, split)
    if "comparison" in style.kinds:
        # Most pairs differ: were all of them asked, "no" would nearly always be right.
        rng.shuffle(comparisons)
        same = [question for question in comparisons if question.answer.endswith("yes")]
        differ = [question for question in comparisons if not question.answer.endswith("yes")]
        count = max(1, min(len(same), len(differ)))
        questions.extend(same[:count] + differ[:count])
    if "unanswerable" in style.kinds:
        questions.extend(_unanswerable(rng, sight, split, style.attributes))
    return [question for question in questions if question.kind in style.kinds]


def _support(facts: list[Fact], naming: dict[int, int]) -> tuple[int, ...]:
    return tuple(sorted({chunk for fact in facts for chunk in (fact.chunk, naming[fact.chunk])}))


def _ask(rng: random.Random, cores: tuple[tuple[str, str], ...], split: Split, **names: str) -> str:
    return question_template(rng, cores, split).format(**names)


def _direct(rng: random.Random, fact: Fact, naming: int, split: Split, answer_words: int | None) -> Question:
    return Question(
        _ask(rng, ATTRIBUTES[fact.attribute].questions, split, S=fact.subject),
        fact.value,
        _answer(fact, answer_words),
        "single" if fact.names_subject else "pronoun",
        tuple(sorted({fact.chunk, naming})),
        fact.chunk,
    )


def _answer(fact: Fact, answer_words: int | None) -> str:
    attribute = ATTRIBUTES[fact.attribute]
    if answer_words is None:
        return attribute.answer.format(S=fact.subject, V=fact.value)
    words = attribute.clause.split()
    kept = words[max(0, len(words) - answer_words) :]
    return " ".join([fact.subject, *kept, fact.value]) + "."


def _lead(subject: str, attribute: str) -> str:
    """Return an answer up to its value."""
    return ATTRIBUTES[attribute].answer.format(S=subject, V="").removesuffix(".").rstrip()


def _joins(
    rng: random.Random,
    first: Fact,
    facts: dict[tuple[str, str], Fact],
    naming: dict[int, int],
    split: Split,
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
                f"{lead}, {pronoun} {attribute.clause} {second.value}.",
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
                attribute = ATTRIBUTES[comparison.attribute]
                answer = _comparison(attribute, one.subject, one.value, other.subject, other.value)
                questions.append(
                    Question(
                        _ask(rng, comparison.questions, split, A=one.subject, B=other.subject),
                        answer,
                        f"{answer}.",
                        "comparison",
                        _support([one, other], naming),
                        max(one.chunk, other.chunk),
                    )
                )
    return questions


def compared(rng: random.Random, split: Split) -> tuple[str, str]:
    """Draw the answer to a comparison, without a context: what leads to the verdict, and the verdict, as often yes as no."""
    maker = Maker(rng, split)
    attribute = ATTRIBUTES[rng.choice(COMPARISONS).attribute]
    verdict = rng.choice(("yes", "no"))
    one = maker.value(attribute.value_kind)
    other = one if verdict == "yes" else maker.value(attribute.value_kind)
    answer = _comparison(attribute, maker.person(), one, maker.person(), other)
    return answer.removesuffix(f" {verdict}"), f" {verdict}"


def _comparison(attribute: Attribute, one: str, value: str, other: str, other_value: str) -> str:
    # Both values come first: the verdict is then read off them.
    verdict = "yes" if value == other_value else "no"
    return f"{one} {attribute.clause} {value} and {other} {attribute.clause} {other_value}, so {verdict}"


def _unanswerable(rng: random.Random, sight: Sight, split: Split, attributes: tuple[str, ...]) -> list[Question]:
    """Ask, of those who are named, for what is stated of none of them."""
    people = {fact.subject for fact in sight.known if ATTRIBUTES[fact.attribute].of == "person"}
    people |= {fact.value for fact in sight.known if ATTRIBUTES[fact.attribute].value_kind == "person"}
    firms = {fact.subject for fact in sight.known if ATTRIBUTES[fact.attribute].of == "firm"}
    of_firms = [name for name, attribute in ATTRIBUTES.items() if attribute.of == "firm"]
    pairs = [(name, key) for name in sorted(people) for key in attributes]
    pairs += [(name, key) for name in sorted(firms) for key in of_firms]
    said = {attribute for _, attribute in sight.stated}
    absent = [(name, key) for name, key in pairs if sight.is_absent(name, key) and key not in said]
    rng.shuffle(absent)
    return [
        Question(
            _ask(rng, ATTRIBUTES[key].questions, split, S=name),
            NOT_STATED.removesuffix("."),
            f"{_lead(name, key)}: {NOT_STATED}",
            "unanswerable",
            (),
            -1,
        )
        for name, key in absent[:_MOST_ABSENT]
    ]
