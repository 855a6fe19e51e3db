"""Fidelity: how good answers are, by method and kind of question."""

from __future__ import annotations

from cacheblend_attachments.calibration.statistics import Bootstrap, Interval
from cacheblend_lab.eval.asking import EvalSetting
from cacheblend_lab.eval.methods import EvalMethod, grid_methods, parse_method, parse_methods
from cacheblend_lab.eval.metrics import exact_match, f1_score, normalize_answer
from cacheblend_lab.eval.reference import reference_task
from cacheblend_lab.eval.result import EvalResult, EvalRow
from cacheblend_lab.eval.retrieve import RetrievalSetting
from cacheblend_lab.eval.task import EvalContext, EvalQuestion, EvalTask
from cacheblend_lab.eval.workers import default_workers, evaluate

__all__ = [
    "Bootstrap",
    "EvalContext",
    "EvalMethod",
    "EvalQuestion",
    "EvalResult",
    "EvalRow",
    "EvalSetting",
    "EvalTask",
    "Interval",
    "RetrievalSetting",
    "default_workers",
    "evaluate",
    "exact_match",
    "f1_score",
    "grid_methods",
    "normalize_answer",
    "parse_method",
    "parse_methods",
    "reference_task",
]
