"""Evaluation in several processes: a small model keeps one core busy, not more."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.eval.reference import Answer, EvalRow, EvalSetting, ReferenceEval, examples_of, tabulate
from cacheblend_rag.reference.corpus import Example

__all__ = ["default_workers", "evaluate"]

_run: ReferenceEval | None = None


def default_workers() -> int:
    """Return one worker for each core that this process may use, or one where the model runs on a GPU."""
    if torch.cuda.is_available():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def evaluate(
    engine: BlendEngine,
    model: str,
    setting: EvalSetting,
    *,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[EvalRow]:
    """Ask every question by every method.

    Parameters
    ----------
    engine : BlendEngine
        The engine; with several workers only its settings count, which were checked when it was made.
    model : str
        The model's name, for workers to load it.
    setting : EvalSetting
        What is evaluated.
    workers : int
        How many processes; with one, everything runs in this one.
    progress : callable, optional
        Called with the number of answered questions and of all.

    Returns
    -------
    list of EvalRow
        See `tabulate`.
    """
    report = progress or (lambda done, total: None)
    examples = examples_of(setting)
    run = ReferenceEval(engine, setting)
    answers: list[Answer] = []
    done = 0
    if workers == 1:
        try:
            for example in examples:
                answers += run.ask(example)
                done += len(example.questions)
                report(done, setting.num_questions)
        finally:
            run.close()
        return tabulate(setting, answers)
    run.close()
    # Spawned, because a process that has used torch's threads cannot be forked safely.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start, (model, engine.config, setting)) as pool:
        asked = {pool.submit(_ask, example): example for example in examples}
        for future in as_completed(asked):
            answers += future.result()
            done += len(asked[future].questions)
            report(done, setting.num_questions)
    return tabulate(setting, answers)


def _start(model: str, config: BlendConfig, setting: EvalSetting) -> None:
    from transformers.utils import logging

    global _run
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    _run = ReferenceEval(BlendEngine.from_pretrained(model, config=config), setting)


def _ask(example: Example) -> list[Answer]:
    assert _run is not None
    return _run.ask(example)
