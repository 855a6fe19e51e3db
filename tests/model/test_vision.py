"""Vision-language models on text: whatever their rotary embedding does for images, text turns by one axis."""

from __future__ import annotations

import pytest
from transformers import AutoModelForImageTextToText

from cacheblend_lab.families import prove, tiny_config, tiny_model

EXACT = ("qwen2_5_vl", "qwen3_vl", "llava", "mistral3")
MORE = (
    "aria",
    "aya_vision",
    "cohere2_vision",
    "gemma3",
    "idefics2",
    "idefics3",
    "internvl",
    "llama4",
    "llava_next",
    "llava_onevision",
    "ovis2",
    "qwen2_vl",
    "qwen3_vl_moe",
    "smolvlm",
    "video_llama_3",
)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("family", [*EXACT, *(pytest.param(family, marks=pytest.mark.full) for family in MORE)])
def test_a_vision_language_model_blends_text(family: str) -> None:
    proof = prove(tiny_model(tiny_config(family), kind=AutoModelForImageTextToText))
    assert proof.is_exact, proof


def test_one_that_lets_text_see_what_follows_is_refused() -> None:
    proof = prove(tiny_model(tiny_config("paligemma"), kind=AutoModelForImageTextToText))
    assert proof.refused is not None and "other logits than the model itself" in proof.refused
    assert not proof.failed
