"""Calibration on the prompts that a framework makes of questions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

from cacheblend_attachments.calibration.calibrate import Calibration, calibrate, checked_ratios
from cacheblend_rag.chat.answer import ModelCall
from cacheblend_rag.chunk import Chunk, ChunkRef
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError

__all__ = ["calibrate_asking"]


def calibrate_asking(
    ask: Callable[[Any], Sequence[ModelCall]],
    questions: Sequence[Any],
    *,
    answers: Sequence[str | None] = (),
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Calibration:
    """Calibrate with the prompts that come of asking questions: of each question's calls, the last with chunks.

    Parameters
    ----------
    ask : callable
        Asks a question, and returns the calls of the model that this took.
    questions : sequence
        What is asked.
    answers, progress, **options
        As for `calibrate`.

    Returns
    -------
    Calibration
        What was measured, with questions that no chunks were found for among the skipped.

    Raises
    ------
    ConfigError
        If no question was answered from chunks, or from those of several engines, and as `calibrate` does.
    """
    # Before anything is answered.
    if isinstance(questions, str):
        raise ConfigError(f"questions={questions[:80]!r} is a string; give a list of questions")
    given = inspect.signature(calibrate).bind(None, [], **options)
    given.apply_defaults()
    checked_ratios(given.arguments["ratios"], given.arguments["target"])
    say = progress or (lambda text: None)
    asked: list[tuple[ModelCall, str | None]] = []
    for number, (question, answer) in enumerate(zip(questions, chain(answers, repeat(None)), strict=False), 1):
        say(f"asking question {number} of {len(questions)}")
        calls = [
            call for call in ask(question) if any(isinstance(each, Chunk | ChunkRef) for each in call.prompt.segments)
        ]
        asked += [(call, answer) for call in calls[-1:]]
    if not asked:
        raise ConfigError(
            f"none of {len(questions)} questions was answered by blending chunks; ask a query engine with response_mode='blend', "
            "or a chain with a ChatBlend or BlendLLM whose documents are stored"
        )
    first = asked[0][0]
    if not isinstance(first.engine, BlendEngine):
        raise ConfigError(
            f"a {type(first.engine).__name__} answered, but calibration needs the model itself; use an engine in this process"
        )
    if any(call.engine is not first.engine for call, _ in asked):
        raise ConfigError("the questions were answered by several engines; calibrate one at a time")
    found = calibrate(
        first.engine,
        [call.prompt for call, _ in asked],
        answers=[answer for _, answer in asked],
        progress=progress,
        **({"blend": first.blend} | options),
    )
    return replace(found, skipped=found.skipped + len(questions) - len(asked))
