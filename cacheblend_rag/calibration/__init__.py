"""The smallest `recompute_ratio` whose answers agree with full prefill's, on a user's own questions."""

from __future__ import annotations

from cacheblend_rag.calibration.calibrate import Calibration, CalibrationRow, calibrate
from cacheblend_rag.calibration.files import read_questions, write_settings

__all__ = [
    "Calibration",
    "CalibrationRow",
    "calibrate",
    "read_questions",
    "write_settings",
]
