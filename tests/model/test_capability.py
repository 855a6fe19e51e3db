"""What is said of a model's layers is what its configuration made them."""

from __future__ import annotations

from cacheblend_lab.families import tiny_config, tiny_model
from cacheblend_rag import BlendEngine
from cacheblend_rag.model import capability
from tests.families import tiny_tokenizer


def test_each_layer_says_what_it_attends_with_and_where_its_positions_are() -> None:
    seen = capability(tiny_model(tiny_config("smollm3", no_rope_layers=[1, 1, 1, 0, 1, 1])))
    assert seen.reason is None and len(seen.layers) == 6
    assert [layer.positions for layer in seen.layers].index("none in its KV") == 3
    assert seen.layers[3].blending == "reused anywhere as it is"
    assert seen.layers[0].positions == "rotary, half, 8 dimensions"
    assert seen.layers[0].blending == "reused anywhere, keys turned"
    assert seen.layers[0].attention == "full with 4 heads on 2"


def test_windows_sinks_and_scaling_are_named() -> None:
    layers = capability(tiny_model(tiny_config("gpt_oss"))).layers
    assert layers[0].attention == "sliding of 16 with 4 heads on 2, sinks"
    assert layers[1].attention == "full with 4 heads on 2, sinks"
    assert layers[0].positions.endswith("yarn scaling")


def test_latents_shared_kv_and_fixed_positions_are_named() -> None:
    assert capability(tiny_model(tiny_config("deepseek_v3"))).layers[0].blending == "reused anywhere, values turned"
    shared = capability(tiny_model(tiny_config("gemma3n_text"))).layers
    assert [layer.blending for layer in shared[4:]] == ["attends to the blended KV of an earlier layer"] * 2
    assert {layer.blending for layer in capability(tiny_model(tiny_config("gpt2"))).layers} == {
        "reused at the position of encoding only; chunks are encoded alone, without their documents"
    }


def test_a_refused_model_names_its_layers_and_the_reason() -> None:
    with BlendEngine(tiny_model(tiny_config("qwen3_next")), tiny_tokenizer()) as engine:
        seen = engine.capability()
    assert seen.reason is not None and "linear_attention" in seen.reason
    assert [layer.attention for layer in seen.layers].count("full attention") == 1
    assert {layer.blending for layer in seen.layers} == {"none: prompts are prefilled in full"}
