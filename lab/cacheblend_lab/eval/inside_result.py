"""Changes inside the model by blending, over the questions of a task: the data of CacheBlend's and A3's figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from cacheblend_lab.eval.inquiry import inquire
from cacheblend_lab.eval.inside import ORACLES, InsidePass, PromptInside, TokenOverlap
from cacheblend_lab.eval.methods import EvalMethod, parse_method
from cacheblend_lab.eval.retrieve import RetrievalSetting, Retriever
from cacheblend_lab.eval.statistics import Spread, rank_correlation, spread
from cacheblend_lab.eval.task import EvalTask
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError, PromptTooLongError

__all__ = ["REUSE", "InsideResult", "InsideRow", "InsideSetting", "look_inside"]

REUSE = "reuse"
_PERCENTILES = np.arange(101)


@dataclass(frozen=True)
class InsideSetting:
    """Settings of the analysis.

    Attributes
    ----------
    selectors : tuple of str
        Selectors, settings may follow as in the methods of an evaluation ("hkvd check_layers=[1,2]"); and names of `ORACLES`.
    ratios : tuple of float
        Recompute ratios.
    shown_ratio : float
        The one of them whose overlap is kept and whose attention loss is drawn layer by layer.
    retrieval : RetrievalSetting
        How contexts that are not chunks yet are cut and searched.
    """

    selectors: tuple[str, ...] = ("hkvd", "query", "random")
    ratios: tuple[float, ...] = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
    shown_ratio: float = 0.15
    retrieval: RetrievalSetting = field(default_factory=RetrievalSetting)

    def __post_init__(self) -> None:
        if not self.selectors or self.shown_ratio not in self.ratios:
            raise ConfigError(
                f"selectors={self.selectors}, ratios={self.ratios}: give at least one selector, and "
                f"shown_ratio={self.shown_ratio:g} among the ratios"
            )
        self.methods()

    def methods(self) -> dict[str, dict[float, EvalMethod | None]]:
        """Return for each selector what each ratio means; None for an oracle."""
        return {
            name: {
                ratio: None if name in ORACLES else parse_method(f"{name} {ratio:g}")
                for ratio in dict.fromkeys(self.ratios)
            }
            for name in dict.fromkeys(self.selectors)
        }


@dataclass(frozen=True)
class InsideRow:
    """One selector at one ratio, over all questions.

    Attributes
    ----------
    selector : str
        The selector, or "reuse" for plain reuse.
    ratio : float
        The recompute ratio.
    charged_ratio : float
        Mean work on chunk tokens over (chunk tokens x layers).
    attention_deviation : Spread
        Attention deviation, mean over the layers, over the questions.
    of_reuse : float
        The sum of these over the questions, over that of plain reuse.
    by_layer : tuple of float
        Attention deviation of each layer, mean over the questions.
    hit_rate : float or None
        Of the tokens that the question attends to most under full prefill, as many as the ratio recomputes, the share that is
        recomputed; None where that is no token.
    by_question : tuple of float
        Attention deviation, mean over the layers, of each question.
    """

    selector: str
    ratio: float
    charged_ratio: float
    attention_deviation: Spread
    of_reuse: float
    by_layer: tuple[float, ...]
    hit_rate: float | None
    by_question: tuple[float, ...]


@dataclass(frozen=True)
class InsideResult:
    """Findings of the analysis.

    Attributes
    ----------
    rows : tuple of InsideRow
        Plain reuse, then every selector at every ratio.
    attention_norm : tuple of float
        The L2 norm of full prefill's forward attention matrix of each layer, mean over the questions.
    kv_deviation : dict of int to tuple of float
        For each layer from 1 on, the percentiles 0 to 100 of the tokens' KV deviation, all questions together; each layer of each
        prompt is divided by its mean.
    correlation : dict of int to Spread
        For each layer from 1 on but the last, Spearman's rank correlation of its tokens' KV deviation with the next layer's.
    overlap : TokenOverlap
        The first question's high-attention tokens, and those that each selector recomputes at `shown_ratio`.
    shown_ratio : float
        That ratio.
    questions : tuple of str
        The ids of the questions looked at.
    tokens : tuple of int
        For each of them, its candidates: chunk tokens whose stored KV may differ from the true one.
    skipped : dict of str to int
        Why questions were not looked at, and how many.
    """

    rows: tuple[InsideRow, ...]
    attention_norm: tuple[float, ...]
    kv_deviation: dict[int, tuple[float, ...]]
    correlation: dict[int, Spread]
    overlap: TokenOverlap
    shown_ratio: float
    questions: tuple[str, ...]
    tokens: tuple[int, ...]
    skipped: dict[str, int]


def look_inside(
    engine: BlendEngine,
    task: EvalTask,
    setting: InsideSetting,
    progress: Callable[[int, int], None] | None = None,
) -> InsideResult:
    """Prefill every question of a task in full, by plain reuse, and by each selector at each ratio, and compare."""
    methods = setting.methods()
    sums = _Sums([(REUSE, 0.0), *((name, ratio) for name, ratios in methods.items() for ratio in ratios)])
    retriever = Retriever(engine.tokenizer, setting.retrieval)
    total, done = sum(len(context.questions) for context in task.contexts), 0
    for context in task.contexts:
        with inquire(task, context, retriever, [engine]) as inquiries:
            for question, inquiry in inquiries:
                reason = inquiry if isinstance(inquiry, str) else _why_not(engine, inquiry.prompt)
                if reason is None and not isinstance(inquiry, str):
                    sums.add(question.id, PromptInside(engine, inquiry.prompt), methods, setting.shown_ratio)
                elif reason is not None:
                    sums.skipped[reason] = sums.skipped.get(reason, 0) + 1
                done += 1
                if progress is not None:
                    progress(done, total)
    return sums.result(setting.shown_ratio)


def _why_not(engine: BlendEngine, prompt: BlendPrompt) -> str | None:
    try:
        layout = engine.prompt_layout(prompt)
    except PromptTooLongError as error:
        return str(error)
    return None if layout.context_rows.numel() else "none of its chunks is served from stored KV"


class _Sums:
    """Sums over the prompts that were looked at."""

    def __init__(self, cells: Sequence[tuple[str, float]]) -> None:
        self._passes: dict[tuple[str, float], list[tuple[InsidePass, float | None]]] = {cell: [] for cell in cells}
        self._deviations: list[NDArray[np.float64]] = []
        self._norms: list[NDArray[np.float64]] = []
        self._questions: list[str] = []
        self._overlap: TokenOverlap | None = None
        self.skipped: dict[str, int] = {}

    def add(
        self,
        question: str,
        prompt: PromptInside,
        methods: dict[str, dict[float, EvalMethod | None]],
        shown_ratio: float,
    ) -> None:
        shown: dict[str, InsidePass] = {}
        self._passes[REUSE, 0.0].append((prompt.reuse, None))
        for name, ratios in methods.items():
            for ratio, method in ratios.items():
                found = prompt.oracle(name, ratio) if method is None else prompt.blended(method.settings())
                overlap = prompt.overlap({name: found}, ratio)
                self._passes[name, ratio].append((found, overlap.hit_rate(name) if prompt.budget(ratio) else None))
                if ratio == shown_ratio:
                    shown[name] = found
        self._overlap = self._overlap or prompt.overlap(shown, shown_ratio)
        self._deviations.append(prompt.kv_deviation)
        self._norms.append(prompt.attention_norm)
        self._questions.append(question)

    def result(self, shown_ratio: float) -> InsideResult:
        if self._overlap is None:
            raise ConfigError(
                f"no question can be looked at; the first because {next(iter(self.skipped), 'there is none')}"
            )
        reuse = sum(float(each.attention_deviation.mean()) for each, _ in self._passes[REUSE, 0.0])
        pooled = np.concatenate(self._deviations, axis=1)
        pairs = range(1, pooled.shape[0] - 1)
        return InsideResult(
            rows=tuple(_row(name, ratio, passes, reuse) for (name, ratio), passes in self._passes.items()),
            attention_norm=tuple(np.mean(self._norms, axis=0).tolist()),
            kv_deviation={
                layer: tuple(np.percentile(pooled[layer], _PERCENTILES).tolist()) for layer in range(1, pooled.shape[0])
            },
            correlation={
                layer: spread([rank_correlation(each[layer], each[layer + 1]) for each in self._deviations])
                for layer in pairs
            },
            overlap=self._overlap,
            shown_ratio=shown_ratio,
            questions=tuple(self._questions),
            tokens=tuple(each.shape[1] for each in self._deviations),
            skipped=self.skipped,
        )


def _row(selector: str, ratio: float, passes: Sequence[tuple[InsidePass, float | None]], reuse: float) -> InsideRow:
    means = [float(each.attention_deviation.mean()) for each, _ in passes]
    rates = [rate for _, rate in passes if rate is not None]
    return InsideRow(
        selector=selector,
        ratio=ratio,
        charged_ratio=fmean(each.charged_ratio for each, _ in passes),
        attention_deviation=spread(means),
        of_reuse=sum(means) / reuse if reuse else 0.0,
        by_layer=tuple(np.mean([each.attention_deviation for each, _ in passes], axis=0).tolist()),
        hit_rate=fmean(rates) if rates else None,
        by_question=tuple(means),
    )
