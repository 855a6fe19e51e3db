"""The smallest recompute ratio whose answers agree with full prefill, on somebody's own prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from statistics import NormalDist, fmean, median

from cacheblend_rag.answers import exact_match, f1_score, holds_answer
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine, GenerationResult
from cacheblend_rag.engine.watch import FirstLogits, TokenDistribution
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.selection import make_selector

__all__ = ["DEFAULT_RATIOS", "Calibration", "CalibrationRow", "calibrate", "check_count", "checked_ratios"]

DEFAULT_RATIOS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.25, 0.4, 0.6)


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """Measurements at one ratio.

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


@dataclass(frozen=True)
class Calibration:
    """Result of `calibrate`.

    Attributes
    ----------
    selector : str
        The selector.
    target : float
        The agreement that was asked for.
    confidence : float
        Probability that no ratio whose true agreement is below the target was chosen.
    questions : int
        Prompts that were asked.
    skipped : int
        Prompts that are prefilled in full whatever the ratio, and say nothing of it.
    rows : tuple of CalibrationRow
        The ratios that were tried, in order.
    recompute_ratio : float or None
        The chosen one; None if none under 1 reaches the target.
    reason : str
        Why, in a sentence.
    """

    selector: str
    target: float
    confidence: float
    questions: int
    skipped: int
    rows: tuple[CalibrationRow, ...]
    recompute_ratio: float | None
    reason: str

    def __str__(self) -> str:
        """Return what was chosen, and a line for each ratio that was tried."""
        lines = [
            f"  ratio {row.recompute_ratio:g}: agrees on {row.agreement:.1%} of {row.questions} questions, at least "
            f"{row.agreement_low:.1%}; first token {row.ttft_ratio:.2f} of full prefill's"
            + ("" if row.questions == self.questions else "; given up then, as the rest could not reach the target")
            for row in self.rows
        ]
        return "\n".join([self.reason, *lines])


@dataclass(frozen=True, eq=False)
class _Reference:
    """The answer that a prompt's answers are compared with.

    It is full prefill's, of the whole documents where chunks remember them; or the right answer, where it was given.
    """

    prompt: BlendPrompt
    text: str
    answer: str | None
    is_known: bool
    """Whether full prefill read all that the chunks remember."""
    first: TokenDistribution
    ttft_s: float

    def is_met_by(self, text: str) -> bool:
        """Return whether another answer is as good."""
        return exact_match(text, self.text) if self.answer is None else holds_answer(text, self.answer)


def calibrate(
    engine: BlendEngine,
    prompts: Sequence[BlendPrompt],
    *,
    answers: Sequence[str | None] = (),
    blend: BlendConfig | None = None,
    selector: str | None = None,
    ratios: Sequence[float] = DEFAULT_RATIOS,
    agreement: float = 0.95,
    confidence: float = 0.95,
    max_new_tokens: int = 32,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Find the smallest recompute ratio whose greedy answers agree with full prefill's, or are as often right.

    Full prefill answers every prompt once. Where chunks remember their documents it reads the whole documents instead of the
    chunks; where these do not fit the model's window, nothing is chosen. A prompt whose right answer is given counts if full
    prefill has it, and an answer agrees if it has it too.

    Then the ratios are tried from the smallest on; one is given up as soon as it cannot reach the target even if all others
    agree. More recomputed tokens need not give better answers, so nothing is concluded from one ratio about another: the smallest
    ratio that reaches the target is chosen only if the next larger one, which is measured for that, reaches it too. The interval
    is Wilson's, its confidence shared among all ratios (Bonferroni), so that the one chosen is not merely the luckiest of many.

    Parameters
    ----------
    engine : BlendEngine
        The engine, which nothing else should use meanwhile. KV that is missing is computed and stored before anything is timed.
    prompts : sequence of BlendPrompt
        Prompts as they will be asked: retrieved chunks and a question.
    answers : sequence of (str or None), optional
        The right answer to each prompt, where it is known.
    blend : BlendConfig, optional
        Settings of the calls over the engine's; by default the engine's alone.
    selector : str, optional
        The selector; by default that of the settings.
    ratios : sequence of float
        The ratios to try, from 0 to below 1.
    agreement : float
        Least share of answers that are full prefill's, above 0 and below 1.
    confidence : float
        Confidence of that, at least 0.5 and below 1.
    max_new_tokens : int
        Most tokens of an answer.
    progress : callable, optional
        Called with what is done now.

    Returns
    -------
    Calibration
        What was measured, and what was chosen.

    Raises
    ------
    ConfigError
        If there are too few prompts for the target, or a setting has no meaning.
    UnsupportedModelError
        If the model cannot be blended.
    """
    say = progress or (lambda text: None)
    if engine.unsupported_reason is not None:
        raise UnsupportedModelError(f"{engine.unsupported_reason}; there is nothing to calibrate")
    ladder = checked_ratios(ratios, agreement, confidence)
    blend = engine.blend if blend is None else engine.check_blend(blend)
    blend = blend if selector is None else blend.replace(selector=selector)
    name = make_selector(blend.selector).name
    if name in ("full", "none"):
        raise ConfigError(
            f"selector={name!r} recomputes the same tokens at every ratio; choose another one to calibrate"
        )
    each_confidence = 1 - (1 - confidence) / len(ladder)
    blends = {ratio: blend.replace(enabled=True, recompute_ratio=ratio) for ratio in ladder}
    ready = []
    for number, (prompt, answer) in enumerate(zip(prompts, chain(answers, repeat(None)), strict=False), 1):
        say(f"preparing question {number}")
        if _is_blended(engine, prompt, blend):
            ready.append((prompt, answer))
    skipped = len(prompts) - len(ready)
    needed = check_count(len(ready), skipped, ladder, agreement, confidence)
    asked = list(_references(engine, ready, blend.replace(enabled=False), max_new_tokens, say))
    references = [each for each in asked if each.is_met_by(each.text)]
    if len(references) < needed:
        raise ConfigError(
            f"full prefill gives the right answer to {len(references)} of {len(asked)} questions; {needed} are needed to show an "
            "agreement with them: give more questions, or take a model that answers them"
        )
    rows: list[CalibrationRow] = []
    for tried, blending in blends.items():
        say(f"ratio {tried:g}")
        row = _measure(engine, references, blending, max_new_tokens, agreement, each_confidence)
        rows.append(row)
        if len(rows) > 1 and rows[-2].reached and row.reached:
            break
    chosen = confirmed(rows)
    reason = explain(rows, chosen, agreement, confidence)
    unknown = sum(not each.is_known and each.answer is None for each in references)
    if unknown:
        chosen = None
        reason = (
            f"Nothing is chosen: the chunks of {unknown} questions remember documents that do not fit the model's window, so "
            "that full prefill of the chunks knows less than they do; give the right answers to compare with."
        )
    ratio = None if chosen is None else chosen.recompute_ratio
    return Calibration(name, agreement, confidence, len(references), skipped, tuple(rows), ratio, reason)


def checked_ratios(ratios: Sequence[float], agreement: float, confidence: float) -> list[float]:
    """Return the ratios in order, each once; `ConfigError` if a setting of a calibration has no meaning."""
    if not 0 < agreement < 1:
        raise ConfigError(
            f"agreement={agreement!r} must be above 0 and below 1: no sample shows that all answers agree"
        )
    if not 0.5 <= confidence < 1:
        raise ConfigError(f"confidence={confidence!r} must be at least 0.5 and below 1; 0.95 is usual")
    ladder = sorted(set(ratios))
    if not ladder or not all(0 <= ratio < 1 for ratio in ladder):
        raise ConfigError(f"ratios={tuple(ratios)} must be numbers from 0 to below 1, one at least")
    return ladder


def check_count(questions: int, skipped: int, ladder: Sequence[float], agreement: float, confidence: float) -> int:
    """Return how many questions a calibration needs at least; `ConfigError` if there are fewer."""
    needed = least_questions(agreement, 1 - (1 - confidence) / len(ladder))
    if questions < needed:
        left_out = f" ({skipped} more are prefilled in full at any ratio)" if skipped else ""
        raise ConfigError(
            f"{questions} questions{left_out} cannot show an agreement of {agreement:g} with a confidence of {confidence:g} "
            f"over {len(ladder)} ratios even if all answers agree; give at least {needed}, or ask for less"
        )
    return needed


def _is_blended(engine: BlendEngine, prompt: BlendPrompt, blend: BlendConfig) -> bool:
    """Return whether a prompt is blended, having had the KV of its chunks stored."""
    plain = blend.replace(enabled=True, recompute_ratio=0.0)
    report = engine.prefill(prompt, blend=plain).report
    if report.misses:
        # With encode_on="second_use" the first time stores nothing.
        report = engine.prefill(prompt, blend=plain).report
    return report.fallback_reason is None


def _references(
    engine: BlendEngine,
    prompts: Sequence[tuple[BlendPrompt, str | None]],
    blend: BlendConfig,
    max_new_tokens: int,
    say: Callable[[str], None],
) -> Iterator[_Reference]:
    # Whoever comes first pays for the first use of the model's kernels.
    _answer(engine, prompts[0][0], blend, 1)
    for number, (prompt, answer) in enumerate(prompts, 1):
        say(f"full prefill, question {number} of {len(prompts)}")
        whole = engine.whole_documents(prompt)
        result, first = _answer(engine, prompt if whole is None else whole, blend, max_new_tokens)
        assert first.logits is not None
        known = whole is not None or not engine.prompt_layout(prompt).remembers
        distribution = TokenDistribution.of(first.logits)
        yield _Reference(prompt, result.text, answer, known, distribution, result.report.ttft_s)


def _answer(
    engine: BlendEngine, prompt: BlendPrompt, blend: BlendConfig, max_new_tokens: int
) -> tuple[GenerationResult, FirstLogits]:
    with FirstLogits(engine.model) as first:
        return engine.generate(prompt, max_new_tokens, blend=blend, do_sample=False), first


def _measure(
    engine: BlendEngine,
    references: Sequence[_Reference],
    blend: BlendConfig,
    max_new_tokens: int,
    agreement: float,
    confidence: float,
) -> CalibrationRow:
    agreeing = 0
    results: list[GenerationResult] = []
    f1: list[float] = []
    kl: list[float] = []
    for reference in references:
        result, first = _answer(engine, reference.prompt, blend, max_new_tokens)
        assert first.logits is not None
        results.append(result)
        agreeing += reference.is_met_by(result.text)
        f1.append(f1_score(result.text, reference.text))
        kl.append(reference.first.kl_to(first.logits))
        at_best = len(references) - len(results) + agreeing
        if lower_bound(at_best, len(references), confidence) < agreement:
            break
    asked = len(results)
    low = lower_bound(agreeing, asked, confidence)
    full_s = median(reference.ttft_s for reference in references[:asked])
    ratio = blend.recompute_ratio
    assert ratio != "auto"
    return CalibrationRow(
        recompute_ratio=ratio,
        charged_ratio=fmean(result.report.charged_ratio for result in results),
        questions=asked,
        agreement=agreeing / asked,
        agreement_low=low,
        f1=fmean(f1),
        first_token_kl=fmean(kl),
        ttft_ratio=median(result.report.ttft_s for result in results) / full_s,
        reached=asked == len(references) and low >= agreement,
    )


def lower_bound(agreeing: int, count: int, confidence: float) -> float:
    """Return the lower end of Wilson's one-sided interval of the share of `agreeing` in `count`, from 0 to 1."""
    if count == 0:
        return 0.0
    z = NormalDist().inv_cdf(confidence)
    share, square = agreeing / count, z * z / count
    spread = z * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, (share + square / 2 - spread) / (1 + square))


def least_questions(agreement: float, confidence: float) -> int:
    """Return how many answers, all agreeing, it takes for the lower end of the interval to reach `agreement`."""
    # Wilson's bound of a full share is count / (count + z^2), so that this is the least count but for rounding.
    z = NormalDist().inv_cdf(confidence)
    count = max(1, math.floor(z * z * agreement / (1 - agreement)))
    while lower_bound(count, count, confidence) < agreement:
        count += 1
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
