"""Evaluations whose texts are generated: RULER's subtasks, and needles over depth and length."""

from __future__ import annotations

from cacheblend_rag.lab.eval.generated.needle import draw_needle_heat_map, needle_heat_map, needle_task
from cacheblend_rag.lab.eval.generated.recall import recall
from cacheblend_rag.lab.eval.generated.ruler import NEEDLE_ACROSS, RULER_SUBTASKS, ruler_task

__all__ = [
    "NEEDLE_ACROSS",
    "RULER_SUBTASKS",
    "draw_needle_heat_map",
    "needle_heat_map",
    "needle_task",
    "recall",
    "ruler_task",
]
