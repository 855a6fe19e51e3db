"""Evaluating a task: in this process or in several, since a small model keeps one core busy, not more."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from cacheblend_lab.eval.asking import Asker, EvalSetting
from cacheblend_lab.eval.journal import Asked, Journal
from cacheblend_lab.eval.result import EvalResult, tabulate
from cacheblend_lab.eval.task import EvalContext, EvalTask
from cacheblend_lab.settings import EngineSettings, settings_of
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.model import model_fingerprint
from cacheblend_rag.tuning import usable_cores

__all__ = ["default_workers", "evaluate"]

_asker: Asker | None = None


def default_workers() -> int:
    """Return one worker for each core that this process may use, or one where the model runs on a GPU."""
    if torch.cuda.is_available():
        return 1
    return usable_cores()


def evaluate(
    engine: BlendEngine,
    model: str,
    task: EvalTask,
    setting: EvalSetting,
    *,
    workers: int = 1,
    journal: Path | None = None,
    fresh: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> EvalResult:
    """Ask every question of a task by every method, and judge the answers.

    Parameters
    ----------
    engine : BlendEngine
        The engine; with several workers only its settings count, which were checked when it was made.
    model : str
        The model's name, for workers to load it.
    task : EvalTask
        The questions.
    setting : EvalSetting
        How they are asked.
    workers : int
        How many processes; with one, everything runs in this one.
    journal : Path, optional
        A file that answers are appended to as they come. If it is there, its questions are not asked again.
    fresh : bool
        Whether to begin the file anew.
    progress : callable, optional
        Called with the number of questions done and of all.

    Returns
    -------
    EvalResult
        Every method's figures.

    Raises
    ------
    ConfigError
        If there are no questions, two have one id, all were skipped, a method has a setting without meaning, or the file belongs
        to another evaluation.
    UnsupportedModelError
        If a method blends and the model cannot be blended.
    """
    report = progress or (lambda done, total: None)
    task = task.written_for(engine.tokenizer)
    ids = [question.id for context in task.contexts for question in context.questions]
    if not ids:
        raise ConfigError(f"{task.name} has no questions; give another file, or a larger number of questions")
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise ConfigError(f"{task.name} has two questions with the id {twice!r}; give each its own")
    with ExitStack() as stack:
        asker = Asker(engine, task, setting)
        stack.callback(asker.close)
        written: Journal | None = None
        asked: dict[str, Asked] = {}
        if journal is not None:
            known, names = set(ids), {method.name for method in setting.methods}

            def expected(each: Asked) -> bool:
                return each.question in known and (each.skipped is not None or each.answers.keys() == names)

            written = Journal(journal, _header(engine, model, task, setting), expected=expected, fresh=fresh)
            stack.enter_context(written)
            asked.update(written.asked)
        resumed = len(asked)
        report(len(asked), len(ids))
        missing = []
        for context in task.contexts:
            wanted = [question.id for question in context.questions if question.id not in asked]
            if wanted:
                missing.append((context, wanted))
        if workers == 1 or len(missing) <= 1:
            source = _ask_here(asker, missing)
        else:
            source = _ask_elsewhere(model, settings_of(engine), task, setting, missing, workers)
        for each in source:
            asked[each.question] = each
            if written is not None:
                written.append(each)
            report(len(asked), len(ids))
    return tabulate(
        task,
        setting,
        [asked[name] for name in ids],
        resumed=resumed,
        damaged_lines=0 if written is None else written.damaged,
    )


def _ask_here(asker: Asker, missing: Sequence[tuple[EvalContext, list[str]]]) -> Iterator[Asked]:
    for context, wanted in missing:
        yield from asker.ask(context, wanted)


def _ask_elsewhere(
    model: str,
    settings: EngineSettings,
    task: EvalTask,
    setting: EvalSetting,
    missing: Sequence[tuple[EvalContext, list[str]]],
    workers: int,
) -> Iterator[Asked]:
    # Metrics may be of a kind that cannot be sent to another process; answers are judged in this one.
    bare = replace(task, contexts=(), metrics={}, extract=str.strip)
    # Spawned, because a process that has used torch's threads cannot be forked safely.
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawning, _start, (model, settings, bare, setting)) as pool:
        futures = [pool.submit(_ask, context, wanted) for context, wanted in missing]
        try:
            for future in as_completed(futures):
                yield from future.result()
        except BaseException:
            # Or leaving would wait for every question that is still in line.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start(model: str, settings: EngineSettings, task: EvalTask, setting: EvalSetting) -> None:
    from transformers.utils import logging

    global _asker
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    _asker = Asker(BlendEngine.from_pretrained(model, **settings), task, setting)


def _ask(context: EvalContext, wanted: list[str]) -> list[Asked]:
    assert _asker is not None
    return list(_asker.ask(context, wanted))


def _header(engine: BlendEngine, model: str, task: EvalTask, setting: EvalSetting) -> dict[str, Any]:
    """Return what answers depend on, as plain values."""
    # The address of a remote tier may hold a password; where a profile is, and how many threads load, changes no answer.
    settings = engine.config.model_dump(mode="json", exclude={"remote"}) | engine.blend.model_dump(mode="json")
    settings |= {k: v for k, v in asdict(engine.tuning).items() if k not in ("profile_path", "load_threads")}
    contexts = [asdict(context) for context in task.contexts]
    frame = [task.head, task.tail, task.separator, task.chunked]
    return {
        "task": task.name,
        "contexts": hashlib.blake2b(json.dumps([frame, contexts]).encode(), digest_size=16).hexdigest(),
        "questions": sum(len(context.questions) for context in task.contexts),
        "model": model,
        "weights": model_fingerprint(engine.model) if isinstance(engine, BlendEngine) else engine.llama.digest(),
        "max_new_tokens": setting.max_new_tokens or task.max_new_tokens,
        "retrieval": None if task.chunked else asdict(setting.retrieval),
        **({"together": True} if setting.together else {}),
        **({"losses": True} if setting.losses else {}),
        "methods": {method.name: method.describe() for method in setting.methods},
        "settings": settings,
    }
