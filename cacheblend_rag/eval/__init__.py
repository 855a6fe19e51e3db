"""Fidelity: how good answers are, by method and kind of question."""

from __future__ import annotations

from cacheblend_rag.eval.agreement import CalibrationRow
from cacheblend_rag.eval.calibrate import Calibration, calibrate
from cacheblend_rag.eval.metrics import exact_match, f1_score, normalize_answer
from cacheblend_rag.eval.questions import read_questions
from cacheblend_rag.eval.reference import EvalRow, EvalSetting, ReferenceEval
from cacheblend_rag.eval.settingsfile import write_settings
from cacheblend_rag.eval.workers import default_workers, evaluate

__all__ = [
    "Calibration",
    "CalibrationRow",
    "EvalRow",
    "EvalSetting",
    "ReferenceEval",
    "calibrate",
    "default_workers",
    "evaluate",
    "exact_match",
    "f1_score",
    "normalize_answer",
    "read_questions",
    "write_settings",
]
