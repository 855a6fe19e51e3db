"""The stages of training, from copying to whole documents.

Trained on the last stage at once, a small model sits for thousands of steps at guessing among the values of the right attribute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cacheblend_rag.lab.training.world import Style

__all__ = ["COPY_LENGTHS", "STAGES", "Stage", "brief_stages"]

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
    questions
        Most questions of a context.
    goal
        The share of held-out answers, right to the last token, at which the next stage begins.
    max_steps
        Steps after which the next stage begins in any case.
    """

    name: str
    style: Style | None
    rows: int
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
_ALL = Style().attributes

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
    Stage(
        "everything", Style(people=(3, 3), firms=(0, 1), facts=(3, 5)), 8, questions=8, goal=1.01, max_steps=1_000_000
    ),
)


def brief_stages(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the stages with answers that are values alone; the last one with more people, who have less in common.

    Stages whose answers are cut to pairs stay as they are: they teach what a value alone is found with.
    """
    brief = [
        stage
        if stage.style is None or stage.style.answer_words is not None
        else replace(stage, style=replace(stage.style, brief=True))
        for stage in stages
    ]
    last = brief[-1].style
    if last is not None:
        fewest, most = last.people
        brief[-1] = replace(brief[-1], style=replace(last, people=(fewest, most + 2), pool=(4, 8)))
    return tuple(brief)
