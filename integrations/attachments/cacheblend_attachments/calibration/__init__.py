"""The smallest `recompute_ratio` that keeps what full prefill knows, on a user's own questions."""

from __future__ import annotations

from cacheblend_attachments.calibration.calibrate import Calibration, CalibrationRow, calibrate, calibrate_asking
from cacheblend_attachments.calibration.files import read_questions, write_settings

__all__ = [
    "Calibration",
    "CalibrationRow",
    "calibrate",
    "calibrate_asking",
    "read_questions",
    "write_settings",
]
