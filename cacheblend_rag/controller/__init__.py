"""Whether and how a prompt is blended: the plan, and the loading controller of CacheBlend (section 5)."""

from __future__ import annotations

from cacheblend_rag.controller.control import Controller, ProbedStore, prompt_work, stored_kv
from cacheblend_rag.controller.measure import Measurement
from cacheblend_rag.controller.plan import Plan, check_attention, check_selector, make_plan, whole_plan
from cacheblend_rag.controller.policy import (
    Choice,
    StoredKV,
    TierChoice,
    Work,
    blend_s,
    cheapest_tier,
    choose,
    full_s,
    largest_hidden_ratio,
    layer_compute_s,
    layer_load_s,
    pipeline_s,
)
from cacheblend_rag.controller.profile import LoadCost, Profile, load_profile, profile_identity, save_profile

__all__ = [
    "Choice",
    "Controller",
    "LoadCost",
    "Measurement",
    "Plan",
    "ProbedStore",
    "Profile",
    "StoredKV",
    "TierChoice",
    "Work",
    "blend_s",
    "cheapest_tier",
    "check_attention",
    "check_selector",
    "choose",
    "full_s",
    "largest_hidden_ratio",
    "layer_compute_s",
    "layer_load_s",
    "load_profile",
    "make_plan",
    "pipeline_s",
    "profile_identity",
    "prompt_work",
    "save_profile",
    "stored_kv",
    "whole_plan",
]
