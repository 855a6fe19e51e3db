"""Which ratio's answers agree with full prefill, and how surely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

__all__ = ["CalibrationRow", "confirmed", "explain", "least_questions", "lower_bound"]


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """What was measured at one ratio.

    Attributes
    ----------
    recompute_ratio : float
        The ratio.
    charged_ratio : float
        Average work on chunk tokens, selection included (`BlendReport.charged_ratio`).
    questions : int
        Prompts asked; fewer than there are where it was clear before the end that the target is not reached.
    agreement : float
        Share of them whose answer is full prefill's, both normalised.
    agreement_low : float
        Lower end of its one-sided interval.
    f1 : float
        Average F1 of the answers' words against full prefill's answers.
    first_token_kl : float
        Average Kullback-Leibler divergence of the first token's distribution from full prefill's, in nats.
    ttft_ratio : float
        Median time to the first token over that of full prefill, on the same prompts.
    reached : bool
        Whether `agreement_low` is at the target, with all prompts asked.
    """

    recompute_ratio: float
    charged_ratio: float
    questions: int
    agreement: float
    agreement_low: float
    f1: float
    first_token_kl: float
    ttft_ratio: float
    reached: bool


def lower_bound(agreeing: int, count: int, confidence: float) -> float:
    """Return the lower end of Wilson's one-sided interval of a share, from 0 to 1.

    Parameters
    ----------
    agreeing, count : int
        How many of how many.
    confidence : float
        Its confidence, above 0 and below 1.
    """
    if count == 0:
        return 0.0
    z = NormalDist().inv_cdf(confidence)
    share, square = agreeing / count, z * z / count
    spread = z * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, (share + square / 2 - spread) / (1 + square))


def least_questions(agreement: float, confidence: float) -> int:
    """Return how many answers, all agreeing, it takes for the lower end of the interval to reach `agreement`."""
    count = 1
    while lower_bound(count, count, confidence) < agreement:
        # Wilson's bound of a full share is count / (count + z^2): near the end, step by step.
        count += max(1, int(0.1 * count))
    while count > 1 and lower_bound(count - 1, count - 1, confidence) >= agreement:
        count -= 1
    return count


def confirmed(rows: Sequence[CalibrationRow]) -> CalibrationRow | None:
    """Return the first row that reached the target together with the next, or the last if that did; None if there is none."""
    pairs = zip(rows, [*rows[1:], None], strict=True)
    return next((row for row, above in pairs if row.reached and (above is None or above.reached)), None)


def explain(rows: Sequence[CalibrationRow], chosen: CalibrationRow | None, agreement: float, confidence: float) -> str:
    """Return in a sentence what was chosen of these rows, and why."""
    if chosen is None:
        best = max(rows, key=lambda row: (row.agreement_low, row.agreement))
        return (
            f"No ratio up to {rows[-1].recompute_ratio:g} is shown to agree with full prefill on {agreement:.1%} of such "
            f"questions; the best, {best.recompute_ratio:g}, agrees on {best.agreement:.1%} of the {best.questions} asked."
        )
    above = next((row for row in rows if row.recompute_ratio > chosen.recompute_ratio), None)
    beside = f", and {above.recompute_ratio:g} does too" if above is not None else ""
    alone = [row for row in rows if row.reached and row.recompute_ratio < chosen.recompute_ratio]
    unsure = (
        f" {alone[-1].recompute_ratio:g} also did, but not the next larger one, so it may be luck." if alone else ""
    )
    return (
        f"{chosen.recompute_ratio:g} is the smallest ratio tried whose answers are full prefill's on at least {agreement:.1%} of "
        f"such questions, with a confidence of {confidence:.1%} (here on {chosen.agreement:.1%} of {chosen.questions}){beside}."
        f"{unsure}"
    )
