"""The metric of RULER: how much of what was hidden an answer names."""

from __future__ import annotations

__all__ = ["recall"]


def recall(answer: str, answers: tuple[str, ...]) -> float:
    """Return the share of the expected strings that stand in an answer, whatever their case (RULER, "string match all").

    Parameters
    ----------
    answer : str
        What the model said.
    answers : tuple of str
        Every string that a right answer names; unlike in other tasks, all of them are expected at once.

    Returns
    -------
    float
        From 0 to 1.
    """
    said = answer.lower()
    return sum(part.lower() in said for part in answers) / len(answers)
