"""Evaluations whose texts are generated: RULER's subtasks, and needles over depth and length."""

from __future__ import annotations

from cacheblend_lab.eval.generated.tasks import NEEDLE_ACROSS, RULER_SUBTASKS, needle_task, ruler_task

__all__ = ["NEEDLE_ACROSS", "RULER_SUBTASKS", "needle_task", "ruler_task"]
