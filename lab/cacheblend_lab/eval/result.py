"""Figures of answers: means by method and kind of question, their intervals, and paired differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np

from cacheblend_attachments.calibration.statistics import Bootstrap, Interval
from cacheblend_lab.eval.asking import EvalSetting
from cacheblend_lab.eval.journal import Answer, Asked
from cacheblend_lab.eval.methods import FULL, NO_CONTEXT, EvalMethod
from cacheblend_lab.eval.task import EvalTask
from cacheblend_rag.errors import ConfigError

__all__ = ["EvalResult", "EvalRow", "tabulate"]

ALL = "all"
# Of questions that may go without an answer because the charge cannot be reached, before the row has no figures.
_UNREACHED_SHARE = 0.01


@dataclass(frozen=True)
class EvalRow:
    """One method's figures on one kind of question, or on ``all``.

    Attributes
    ----------
    kind : str
        The kind.
    method : str
        Its name.
    questions : int
        How many it answered.
    unreached : int
        How many it did not, since it cannot be as cheap as it was asked to be. Where that is more than one in a hundred, the row
        has no other figures.
    metrics : dict of str to Interval
        Mean of each metric with its 95 % interval; empty without figures.
    minus_full : dict of str to Interval
        Paired difference to full prefill, on the questions both answered.
    minus_best : Interval or None
        Paired difference of the first metric to the best of the other methods that blend.
    best : str or None
        Which one that is.
    recompute_ratio : float or None
        Mean of the ratios asked for, or found for a charge.
    charged_ratio : float or None
        Mean work on chunk tokens over (chunk tokens x layers).
    same_as_full : float or None
        Share of answers that are word for word those of full prefill.
    ttft_s : float or None
        Median time to the first token, of the questions that were answered one by one.
    speedup : float or None
        Median over the questions of full prefill's time to the first token over this one.
    output_tokens : float or None
        Mean length of the answers.
    loss : Interval or None
        Mean of the right answers' loss, in nats a token.
    recovered, first_recovered : Interval or None
        Share of the gap between answering without chunks and full prefill that the method recovers, in the loss of the right
        answer and of its first token: 1 is as good as full prefill.
    same_first : float or None
        Share of the questions where it finds the same first token most likely as full prefill.
    """

    kind: str
    method: str
    questions: int
    unreached: int
    metrics: dict[str, Interval]
    minus_full: dict[str, Interval]
    minus_best: Interval | None = None
    best: str | None = None
    recompute_ratio: float | None = None
    charged_ratio: float | None = None
    same_as_full: float | None = None
    ttft_s: float | None = None
    speedup: float | None = None
    output_tokens: float | None = None
    loss: Interval | None = None
    recovered: Interval | None = None
    first_recovered: Interval | None = None
    same_first: float | None = None


@dataclass(frozen=True)
class EvalResult:
    """Result of an evaluation.

    Attributes
    ----------
    rows : tuple of EvalRow
        One for each method over all questions, then one for each method and kind, if there are several.
    metrics : tuple of str
        The metrics; the first is the task's own.
    questions : int
        How many questions the task has.
    skipped : dict of str to int
        Why questions were not asked, and how many.
    resumed : int
        How many questions were taken from the journal of an earlier run.
    damaged_lines : int
        How many lines of the journal could not be read; their questions were asked again.
    resampled : str
        What the bootstrap draws: "contexts", or "questions" where each context has one.
    """

    rows: tuple[EvalRow, ...]
    metrics: tuple[str, ...]
    questions: int
    skipped: dict[str, int]
    resumed: int
    damaged_lines: int
    resampled: str


@dataclass(frozen=True, slots=True)
class _Judged:
    """One answer with its scores, and the number of its context."""

    kind: str
    context: int
    answer: Answer
    scores: Mapping[str, float]


def tabulate(
    task: EvalTask, setting: EvalSetting, asked: Sequence[Asked], *, resumed: int = 0, damaged_lines: int = 0
) -> EvalResult:
    """Judge answers and sum them up.

    An answer of zero length is wrong, whatever the metric.
    """
    skipped: dict[str, int] = {}
    for each in asked:
        if each.skipped is not None:
            skipped[each.skipped] = skipped.get(each.skipped, 0) + 1
    if sum(skipped.values()) == len(asked):
        raise ConfigError(
            f"all {len(asked)} questions of {task.name} were skipped; the first because {next(iter(skipped))}"
        )
    places = {q.id: (number, q) for number, context in enumerate(task.contexts) for q in context.questions}
    judged: dict[str, dict[str, _Judged | None]] = {method.name: {} for method in setting.methods}
    for each in asked:
        if each.skipped is not None:
            continue
        context, question = places[each.question]
        for name, answer in each.answers.items():
            scores = {} if answer is None else _scores(task, answer.text, question.answers)
            judged[name][each.question] = None if answer is None else _Judged(question.kind, context, answer, scores)
    bootstrap = Bootstrap(setting.resamples, setting.seed)
    kinds = list(dict.fromkeys(question.kind for _, question in places.values()))
    rows: list[EvalRow] = []
    for kind in (ALL, *kinds) if kinds != [ALL] else (ALL,):
        of_kind = {
            name: {key: value for key, value in answers.items() if kind in (ALL, places[key][1].kind)}
            for name, answers in judged.items()
        }
        if of_kind[FULL]:
            rows += _rows(kind, setting.methods, tuple(task.metrics), of_kind, bootstrap)
    several = any(len(context.questions) > 1 for context in task.contexts)
    return EvalResult(
        tuple(rows),
        tuple(task.metrics),
        len(asked),
        skipped,
        resumed,
        damaged_lines,
        "contexts" if several else "questions",
    )


def _scores(task: EvalTask, text: str, golds: tuple[str, ...]) -> dict[str, float]:
    value = task.extract(text)
    return {name: float(metric(value, golds)) if value.strip() else 0.0 for name, metric in task.metrics.items()}


def _rows(
    kind: str,
    methods: Sequence[EvalMethod],
    metrics: Sequence[str],
    judged: Mapping[str, Mapping[str, _Judged | None]],
    bootstrap: Bootstrap,
) -> list[EvalRow]:
    first = metrics[0]
    answered = {name: {key: one for key, one in each.items() if one is not None} for name, each in judged.items()}
    complete = {
        name
        for name, each in answered.items()
        if each and len(judged[name]) - len(each) <= _UNREACHED_SHARE * len(judged[name])
    }
    means = {name: fmean(one.scores[first] for one in answered[name].values()) for name in complete}
    rivals = [method.name for method in methods if method.way == "blend" and method.name in complete]
    rows = []
    for method in methods:
        name = method.name
        own = answered[name]
        unreached = len(judged[name]) - len(own)
        if name not in complete:
            rows.append(EvalRow(kind, name, len(own), unreached, {}, {}))
            continue
        clusters = [one.context for one in own.values()]
        best = max((rival for rival in rivals if rival != name), key=means.__getitem__, default=None)
        values = list(own.values())
        both = [(one, answered[FULL][key]) for key, one in own.items() if key in answered[FULL]]
        ratios = [one.answer.recompute_ratio for one in values if one.answer.recompute_ratio is not None]
        charges = [one.answer.charged_ratio for one in values if one.answer.charged_ratio is not None]
        rows.append(
            EvalRow(
                kind=kind,
                method=name,
                questions=len(own),
                unreached=unreached,
                metrics={m: bootstrap.interval([one.scores[m] for one in values], clusters) for m in metrics},
                minus_full={m: _difference(own, answered[FULL], m, bootstrap) for m in metrics},
                minus_best=None if best is None else _difference(own, answered[best], first, bootstrap),
                best=best,
                recompute_ratio=fmean(ratios) if ratios else None,
                charged_ratio=fmean(charges) if charges else None,
                same_as_full=fmean(one.answer.text == full.answer.text for one, full in both),
                ttft_s=_median(one.answer.ttft_s for one in values),
                speedup=_median(_ratio(full.answer.ttft_s, one.answer.ttft_s) for one, full in both),
                output_tokens=fmean(one.answer.output_tokens for one in values),
                **_losses(own, answered[FULL], answered.get(NO_CONTEXT, {}), bootstrap),
            )
        )
    return rows


def _losses(
    own: Mapping[str, _Judged], full: Mapping[str, _Judged], bare: Mapping[str, _Judged], bootstrap: Bootstrap
) -> dict[str, Any]:
    """Return the figures of a row that are made of losses; none where the method has none."""
    trios = [(one, full[key], bare[key]) for key, one in own.items() if key in full and key in bare]
    trios = [each for each in trios if all(one.answer.loss is not None for one in each)]
    if not trios:
        return {}
    clusters = [one.context for one, *_ in trios]

    def gap(loss: Callable[[Answer], float | None]) -> Interval:
        rows = np.array([[loss(one.answer) for one in each] for each in trios], dtype=np.float64)
        return bootstrap.share(rows[:, 2] - rows[:, 0], rows[:, 2] - rows[:, 1], clusters)

    return {
        "loss": bootstrap.interval([one.answer.loss or 0.0 for one, *_ in trios], clusters),
        "recovered": gap(lambda answer: answer.loss),
        "first_recovered": gap(lambda answer: answer.first_loss),
        "same_first": fmean(one.answer.first_token == whole.answer.first_token for one, whole, _ in trios),
    }


def _median(values: Iterable[float | None]) -> float | None:
    """Return the median of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _ratio(full_s: float | None, own_s: float | None) -> float | None:
    return None if full_s is None or own_s is None else full_s / max(own_s, 1e-9)


def _difference(
    own: Mapping[str, _Judged], other: Mapping[str, _Judged], metric: str, bootstrap: Bootstrap
) -> Interval:
    both = [(one, other[key]) for key, one in own.items() if key in other]
    return bootstrap.interval(
        [one.scores[metric] - rival.scores[metric] for one, rival in both], [one.context for one, _ in both]
    )
