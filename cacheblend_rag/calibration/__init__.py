"""The smallest `recompute_ratio` that keeps what full prefill knows, on a user's own questions."""

from __future__ import annotations

from cacheblend_rag.calibration.asking import ModelCall, calibrate_asking
from cacheblend_rag.calibration.calibrate import Calibration, CalibrationRow, calibrate
from cacheblend_rag.calibration.files import read_questions, write_settings

__all__ = [
    "Calibration",
    "CalibrationRow",
    "ModelCall",
    "calibrate",
    "calibrate_asking",
    "read_questions",
    "write_settings",
]
