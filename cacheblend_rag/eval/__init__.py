"""Fidelity: how good answers are, by method and kind of question."""

from __future__ import annotations

from cacheblend_rag.eval.agreement import CalibrationRow
from cacheblend_rag.eval.asking import EvalSetting
from cacheblend_rag.eval.calibrate import Calibration, calibrate
from cacheblend_rag.eval.methods import EvalMethod, grid_methods, parse_method, parse_methods
from cacheblend_rag.eval.metrics import exact_match, f1_score, normalize_answer
from cacheblend_rag.eval.questions import read_questions, read_questions_and_answers
from cacheblend_rag.eval.reference import reference_task
from cacheblend_rag.eval.result import EvalResult, EvalRow
from cacheblend_rag.eval.retrieve import RetrievalSetting
from cacheblend_rag.eval.settingsfile import write_settings
from cacheblend_rag.eval.statistics import Bootstrap, Interval
from cacheblend_rag.eval.task import EvalContext, EvalQuestion, EvalTask
from cacheblend_rag.eval.workers import default_workers, evaluate

__all__ = [
    "Bootstrap",
    "Calibration",
    "CalibrationRow",
    "EvalContext",
    "EvalMethod",
    "EvalQuestion",
    "EvalResult",
    "EvalRow",
    "EvalSetting",
    "EvalTask",
    "Interval",
    "RetrievalSetting",
    "calibrate",
    "default_workers",
    "evaluate",
    "exact_match",
    "f1_score",
    "grid_methods",
    "normalize_answer",
    "parse_method",
    "parse_methods",
    "read_questions",
    "read_questions_and_answers",
    "reference_task",
    "write_settings",
]
