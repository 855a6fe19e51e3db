"""The plan of a prompt, and the loading controller of CacheBlend (section 5)."""

from __future__ import annotations

from cacheblend_rag.controller.control import (
    Controller,
    Plan,
    check_selector,
    make_plan,
    prompt_work,
    whole_plan,
)
from cacheblend_rag.controller.policy import (
    Profile,
    StoredKV,
    Work,
    cheapest_tier,
    choose,
    layer_compute_s,
    layer_load_s,
)

__all__ = [
    "Controller",
    "Plan",
    "Profile",
    "StoredKV",
    "Work",
    "cheapest_tier",
    "check_selector",
    "choose",
    "layer_compute_s",
    "layer_load_s",
    "make_plan",
    "prompt_work",
    "whole_plan",
]
