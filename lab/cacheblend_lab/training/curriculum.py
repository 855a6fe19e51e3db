"""The stages of training, from copying to prompts of paragraphs.

Trained on the last stage at once, a small model sits for thousands of steps at guessing among the values of the right attribute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cacheblend_lab.training.paragraphs import Paragraphs
from cacheblend_lab.training.questions import KINDS, ContextStyle
from cacheblend_lab.training.world import Style

__all__ = ["COPY_LENGTHS", "MEDIUM", "SHORT", "STAGES", "Stage"]

COPY_LENGTHS = (6, 10, 16, 24, 32, 40)
"""Lengths of the copying stage, one after the other."""


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    Attributes
    ----------
    name
        For the log.
    style
        What contexts look like; None for copying alone.
    rows
        Contexts in a batch.
    verdicts
        Rows of comparisons without a context beside them.
    short_rows
        Contexts of :data:`SHORT` in a batch of paragraphs, so that chunks of a sentence are not forgotten.
    medium_rows
        Contexts of :data:`MEDIUM` in a batch of paragraphs.
    questions
        Most questions of a context.
    goal
        The share of held-out answers, right to the last token, at which the next stage begins.
    max_steps
        Steps after which the next stage begins in any case; after those of the last, training ends.
    """

    name: str
    style: ContextStyle | None
    rows: int
    verdicts: int = 0
    short_rows: int = 0
    medium_rows: int = 0
    questions: int = 8
    goal: float = 0.95
    max_steps: int = 1500


_BORN = Style(
    people=(3, 4),
    firms=(0, 0),
    facts=(1, 1),
    attributes=("born",),
    words_between=0,
    variety=0.0,
    pronouns=0.0,
    fillers=0.0,
    kinds=("single",),
)
SHORT = Style(people=(3, 3), firms=(0, 1), facts=(3, 5), kinds=KINDS)
"""Contexts of chunks of a sentence or two, as notes and examples have them."""

MEDIUM = Paragraphs(people=(2, 4), firms=(0, 1), chunks=(2, 4), total=(4, 9))
"""Contexts of few paragraphs: three of them, each about other people, take no longer than one of :class:`Paragraphs`' own."""

STAGES: tuple[Stage, ...] = (
    Stage("copy", None, 48, max_steps=3000),
    # The answer is what the context says, so copying alone finds the town. Then the town moves away from the name word by
    # word. With the whole answer at once, "was" is wanted where copying has the town, and the towns of the context are
    # guessed among for as long as one cares to wait.
    Stage("pairs", replace(_BORN, answer_words=0), 20, goal=0.85),
    Stage("pairs_one_apart", replace(_BORN, answer_words=1), 20, goal=0.85),
    Stage("pairs_two_apart", replace(_BORN, answer_words=2), 20, goal=0.85),
    Stage("side_by_side", _BORN, 20, goal=0.85),
    Stage("two_words_between", Style(**{**vars(_BORN), "people": (3, 5), "words_between": 2}), 20, goal=0.85),
    Stage("sentences", Style(**{**vars(_BORN), "people": (4, 8), "words_between": None}), 16, goal=0.85),
    Stage(
        "attributes",
        Style(people=(2, 4), firms=(0, 1), facts=(1, 3), variety=0.0, pronouns=0.0, fillers=0.0, kinds=("single",)),
        16,
        goal=0.75,
    ),
    Stage(
        "some_pronouns",
        Style(
            people=(2, 3),
            firms=(0, 1),
            facts=(2, 3),
            variety=0.2,
            pronouns=0.5,
            fillers=0.0,
            kinds=("single", "pronoun"),
        ),
        12,
        goal=0.75,
    ),
    # Everybody has the same few attributes here: only the subject tells values apart, so pronouns must be resolved.
    Stage(
        "pronouns",
        Style(
            people=(2, 3),
            firms=(0, 0),
            facts=(2, 2),
            attributes=("born", "lives", "trade", "pet"),
            pool=(2, 2),
            variety=0.3,
            pronouns=1.0,
            fillers=0.0,
            kinds=("single", "pronoun"),
        ),
        12,
        goal=0.9,
    ),
    Stage(
        "two_hops",
        Style(people=(3, 3), firms=(0, 0), facts=(3, 3), pool=(3, 3), variety=0.5, pronouns=0.8, fillers=0.0),
        10,
        goal=0.9,
        # Whole documents go on teaching it.
        max_steps=500,
    ),
    # The three attributes that two people can have the same value of. Of an answer's twenty tokens only the verdict is not
    # copied: trained in contexts alone, it was still guessed after 400 steps. Without a context it is learnt in 100.
    Stage(
        "comparisons",
        Style(
            people=(2, 3),
            firms=(0, 1),
            facts=(2, 3),
            attributes=("born", "lives", "employer"),
            pool=(2, 3),
            variety=0.5,
            pronouns=0.5,
            fillers=0.0,
            kinds=("single", "comparison"),
        ),
        10,
        verdicts=16,
        goal=0.85,
        max_steps=600,
    ),
    # What is asked and not said comes only now: earlier, refusing is what a model that finds nothing yet learns first. It is
    # refused where the value would stand: at an answer's first word nothing is known of the value, and a model of this size
    # hardly ever learns to look ahead for it.
    Stage(
        "unanswerable",
        Style(people=(2, 3), firms=(0, 1), facts=(2, 4), pool=(4, 5), variety=0.5, pronouns=0.6, kinds=KINDS),
        9,
        verdicts=6,
        goal=0.85,
        max_steps=300,
    ),
    Stage(
        "short_paragraphs",
        Paragraphs(
            people=(2, 3),
            firms=(0, 1),
            chunks=(2, 3),
            facts=(1, 2),
            words=(14, 30),
            total=(4, 12),
            pool=(4, 5),
            orders=("reading",),
        ),
        8,
        verdicts=6,
        short_rows=2,
        questions=12,
        goal=0.85,
        max_steps=600,
    ),
    Stage(
        "paragraphs",
        Paragraphs(people=(2, 4), firms=(0, 1), chunks=(2, 4), words=(28, 60), total=(6, 14), pool=(4, 6)),
        5,
        verdicts=6,
        short_rows=2,
        questions=24,
        goal=0.85,
        max_steps=500,
    ),
    Stage(
        "all_lengths",
        Paragraphs(),
        3,
        verdicts=4,
        short_rows=8,
        medium_rows=3,
        questions=32,
        goal=1.01,
        max_steps=800,
    ),
    # Whom a fact is of, among many that differ in little else, is learnt where reading is cheap, and then read elsewhere too.
    Stage(
        "mostly_short",
        Paragraphs(),
        1,
        verdicts=4,
        short_rows=10,
        questions=32,
        goal=1.01,
        max_steps=700,
    ),
    Stage(
        "all_lengths_again",
        Paragraphs(),
        3,
        verdicts=4,
        short_rows=4,
        medium_rows=3,
        questions=32,
        goal=1.01,
        max_steps=500,
    ),
)
