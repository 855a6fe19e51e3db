"""The smallest `recompute_ratio` that keeps what full prefill knows, on a user's own prompts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import numpy as np

from cacheblend_attachments.answers import right_losses, written_after
from cacheblend_rag.chat.answer import ModelCall, calls_made
from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkPart, ChunkRef
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.selection import make_selector

__all__ = ["Calibration", "CalibrationRow", "calibrate", "calibrate_asking"]

_RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """Measurements at one ratio.

    Attributes
    ----------
    recompute_ratio : float
        The ratio.
    charged_ratio : float
        Average work on chunk tokens, selection included (`BlendReport.charged_ratio`).
    loss : float
        Average loss of the right answers, in nats a token.
    recovered : float
        Share of the gap between the prompts without chunks (0) and full prefill (1) that is recovered.
    recovered_low, recovered_high : float
        Its 95 % interval, from bootstrap samples of the prompts.
    ttft_ratio : float
        Median time to the first token over that of full prefill, on the same prompts.
    """

    recompute_ratio: float
    charged_ratio: float
    loss: float
    recovered: float
    recovered_low: float
    recovered_high: float
    ttft_ratio: float


@dataclass(frozen=True)
class Calibration:
    """Result of `calibrate`.

    Attributes
    ----------
    selector : str
        The selector.
    target : float
        The share of the gap that was asked for.
    questions : int
        Prompts that were measured.
    skipped : int
        Prompts that are prefilled in full whatever the ratio, and say nothing of it.
    full_loss, bare_loss : float
        Average loss of the right answers by full prefill, and without any chunk.
    rows : tuple of CalibrationRow
        The ratios, in order.
    recompute_ratio : float or None
        The chosen one; None if none reaches the target.
    reason : str
        Why, in a sentence.
    """

    selector: str
    target: float
    questions: int
    skipped: int
    full_loss: float
    bare_loss: float
    rows: tuple[CalibrationRow, ...]
    recompute_ratio: float | None
    reason: str

    def __str__(self) -> str:
        """Return what was chosen, and a line for each ratio."""
        lines = [
            f"  ratio {row.recompute_ratio:g}: recovers {row.recovered:.2f} [{row.recovered_low:.2f}, {row.recovered_high:.2f}]; "
            f"first token {row.ttft_ratio:.2f} of full prefill's"
            for row in self.rows
        ]
        return "\n".join([self.reason, *lines])


def calibrate(
    engine: BlendEngine,
    prompts: Sequence[BlendPrompt],
    *,
    answers: Sequence[str | None] = (),
    blend: BlendConfig | None = None,
    selector: str | None = None,
    ratios: Sequence[float] = (0.0, 0.05, 0.15, 0.3),
    target: float = 0.95,
    max_new_tokens: int = 24,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Find the smallest recompute ratio that keeps what full prefill knows.

    The loss of the right answer says what a model has understood long before its answers do, so that ten prompts tell more than a
    hundred answers. It is measured by full prefill, without any chunk, and at each ratio; the share of the gap between the first
    two that a ratio recovers is what is compared.

    Parameters
    ----------
    engine : BlendEngine
        The engine, which nothing else should use meanwhile. KV that is missing is computed and stored before anything is timed.
    prompts : sequence of BlendPrompt
        Prompts as they will be asked: retrieved chunks and a question.
    answers : sequence of (str or None), optional
        The right answer to each prompt, where it is known; full prefill's own answer stands in for it elsewhere.
    blend : BlendConfig, optional
        Settings of the calls over the engine's; by default the engine's alone.
    selector : str, optional
        The selector; by default that of the settings.
    ratios : sequence of float
        The ratios to try, from 0 to below 1; an engine that recomputes nothing, as that of GGUF files, is measured at 0 alone.
    target : float
        Least share of the gap that is to be recovered, above 0 and at most 1.
    max_new_tokens : int
        Most tokens of full prefill's own answer.
    progress : callable, optional
        Called with what is done now.

    Returns
    -------
    Calibration
        What was measured, and what was chosen.

    Raises
    ------
    ConfigError
        If no prompt is blended, full prefill finds the answers no likelier than without chunks, or a setting has no meaning.
    UnsupportedModelError
        If the model cannot be blended.
    """
    say = progress or (lambda text: None)
    if engine.unsupported_reason is not None:
        raise UnsupportedModelError(f"{engine.unsupported_reason}; there is nothing to calibrate")
    ladder = _checked_ratios(ratios, target)
    blend = engine.blend if blend is None else engine.check_blend(blend)
    blend = blend if selector is None else blend.replace(selector=selector)
    name = make_selector(blend.selector).name
    if engine.decoder is None:
        # llama.cpp recomputes nothing.
        if selector is not None:
            raise ConfigError(f"selector={selector!r} is of no use: this engine recomputes nothing; leave it out")
        name, ladder = "none", [0.0]
    whole = blend.replace(enabled=False)
    blends = [blend.replace(enabled=True, recompute_ratio=ratio) for ratio in ladder]
    measured = []
    for number, (prompt, answer) in enumerate(zip(prompts, chain(answers, repeat(None)), strict=False), 1):
        say(f"question {number} of {len(prompts)}")
        # This also stores the KV of the chunks.
        first = engine.prefill(prompt, blend=blends[0]).report
        if first.fallback_reason is not None or not first.context_tokens or prompt.positions is not None:
            continue
        if answer is None:
            right = list(engine.generate(prompt, max_new_tokens, blend=whole, do_sample=False).token_ids)
        else:
            text = written_after(answer, prompt.segments[-1])
            right = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        bare = BlendPrompt(
            segments=[each for each in prompt.segments if not isinstance(each, Chunk | ChunkRef | ChunkPart)]
        )
        asked = [(prompt, whole), (bare, whole), *((prompt, each) for each in blends)]
        measured.append([_measure(engine, each, right, settings) for each, settings in asked])
    if not measured:
        raise ConfigError(
            f"none of the {len(prompts)} questions is answered by blending chunks; give prompts with stored chunks"
        )
    # Of each: full prefill, without chunks, and the ratios; by prompt.
    losses, ttfts, charges = np.array(measured).transpose(2, 1, 0)
    full_loss, bare_loss = map(float, losses[:2].mean(1))
    if not full_loss < bare_loss:
        raise ConfigError(
            f"full prefill finds the answers no likelier than without any chunk ({full_loss:.2f} and {bare_loss:.2f} nats a "
            f"token, {len(measured)} questions), so there is nothing to recover; give more text, or questions that it answers"
        )
    draws = np.random.default_rng(0).integers(len(measured), size=(_RESAMPLES, len(measured)))
    rows = []
    for ratio, loss, ttft, charge in zip(ladder, losses[2:], ttfts[2:], charges[2:], strict=True):
        won, gap = losses[1] - loss, losses[1] - losses[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high = np.percentile(won[draws].sum(1) / gap[draws].sum(1), (2.5, 97.5))
        recovered, faster = won.sum() / gap.sum(), np.median(ttft) / np.median(ttfts[0])
        rows.append(CalibrationRow(ratio, *map(float, (charge.mean(), loss.mean(), recovered, low, high, faster))))
    chosen = next((row for row in rows if row.recovered >= target), None)
    reason = _explain(rows, chosen, target, len(measured))
    if name == "none":
        reason += " This engine recomputes nothing: no other ratio was tried."
    return Calibration(
        selector=name,
        target=target,
        questions=len(measured),
        skipped=len(prompts) - len(measured),
        full_loss=full_loss,
        bare_loss=bare_loss,
        rows=tuple(rows),
        recompute_ratio=None if chosen is None else chosen.recompute_ratio,
        reason=reason,
    )


def calibrate_asking(
    ask: Callable[[Any], object],
    questions: Sequence[Any],
    *,
    answers: Sequence[str | None] = (),
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Calibration:
    """Find the smallest recompute ratio that keeps full prefill's quality, on the prompts that an application makes.

    Each question is asked once; of the calls of the model, the last with chunks counts, under its own settings.

    Parameters
    ----------
    ask : callable
        What answers a question with a `BlendLLM` or `ChatBlend`: ``query_engine.query`` of LlamaIndex, ``chain.invoke`` of
        LangChain. Nothing else should use the model meanwhile.
    questions : sequence
        What it is called with, ten at least.
    answers, progress, **options
        As for `calibrate`.

    Returns
    -------
    Calibration
        As of `calibrate`; questions for which no chunks were found are among the `skipped`.

    Raises
    ------
    ConfigError
        If no question was answered from chunks, or several engines answered, and as `calibrate` raises it.
    """
    # Before anything is answered.
    if isinstance(questions, str) or not callable(ask):
        raise ConfigError(
            "give what answers a question, as query_engine.query or chain.invoke, and a list of questions, not "
            f"{ask!r:.80} and {questions!r:.80}"
        )
    given = inspect.signature(calibrate).bind(None, [], **options)
    given.apply_defaults()
    _checked_ratios(given.arguments["ratios"], given.arguments["target"])
    say = progress or (lambda text: None)
    asked: list[tuple[ModelCall, str | None]] = []
    for number, (question, answer) in enumerate(zip(questions, chain(answers, repeat(None)), strict=False), 1):
        say(f"asking question {number} of {len(questions)}")
        with calls_made() as calls:
            # A stream is read, since it may ask the model only then.
            str(ask(question))
        blended = [call for call in calls if any(isinstance(each, Chunk | ChunkRef) for each in call.prompt.segments)]
        asked += [(call, answer) for call in blended[-1:]]
    if not asked:
        raise ConfigError(
            f"none of {len(questions)} questions was answered by blending chunks; ask a query engine with response_mode='blend', "
            "or a chain with a ChatBlend or BlendLLM whose documents are stored"
        )
    first = asked[0][0]
    engine: Any = first.engine
    if not hasattr(engine, "prefill"):
        raise ConfigError(
            f"a {type(engine).__name__} answered, but calibration needs the model itself; use an engine in this process"
        )
    if any(call.engine is not engine for call, _ in asked):
        raise ConfigError("the questions were answered by several engines; calibrate one at a time")
    found = calibrate(
        engine,
        [call.prompt for call, _ in asked],
        answers=[answer for _, answer in asked],
        progress=progress,
        **({"blend": first.blend} | options),
    )
    return replace(found, skipped=found.skipped + len(questions) - len(asked))


def _checked_ratios(ratios: Sequence[float], target: float) -> list[float]:
    """Return the ratios in order, each once; `ConfigError` if a setting of a calibration has no meaning."""
    if not 0 < target <= 1:
        raise ConfigError(f"target={target!r} must be above 0 and at most 1; 0.95 is usual")
    ladder = sorted(set(ratios))
    if not ladder or not all(0 <= ratio < 1 for ratio in ladder):
        raise ConfigError(f"ratios={tuple(ratios)} must be numbers from 0 to below 1, one at least")
    return ladder


def _explain(rows: Sequence[CalibrationRow], chosen: CalibrationRow | None, target: float, questions: int) -> str:
    """Return in a sentence what was chosen of these rows, and why."""
    best = chosen or max(rows, key=lambda row: row.recovered)
    share = (
        f"{best.recovered:.2f} of the gap between no documents and full prefill (95 % interval {best.recovered_low:.2f} to "
        f"{best.recovered_high:.2f}, {questions} questions)"
    )
    if chosen is None:
        tried = f"No ratio up to {rows[-1].recompute_ratio:g} reaches {target:g}"
        return f"{tried}; the best, {best.recompute_ratio:g}, recovers {share}."
    return f"{chosen.recompute_ratio:g} is the smallest ratio that reaches {target:g}: it recovers {share}."


def _measure(
    engine: BlendEngine, prompt: BlendPrompt, right: Sequence[int], blend: BlendConfig
) -> tuple[float, float, float]:
    """Return the right answer's loss in nats a token, the seconds to the first token, and the work on chunk tokens."""
    result, losses = right_losses(engine, prompt, right, blend)
    return float(losses.mean()), result.report.ttft_s, result.report.charged_ratio
