"""The ratio that hides behind loading, on a model and a disk whose speeds are known because they sleep."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_attachments import choose_ratio
from cacheblend_attachments.ratio import loading_s
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.loader import LayerLoader
from cacheblend_rag.trace import LayerTimes
from tests.families import tiny_model, tiny_tokenizer, words

CHUNKS = [Chunk(words(30, seed), f"n{seed}") for seed in range(2)]
PROMPT = BlendPrompt(words(4, 90), ["n0", "n1"], words(6, 91))
ROW_S = 5e-4
"""What a row of a layer takes to compute, besides the computation: 30 ms for the 60 chunk tokens."""


@pytest.fixture
def engine() -> Iterator[BlendEngine]:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda layer, args: time.sleep(ROW_S * args[0].shape[1]))
    with BlendEngine(model, tiny_tokenizer(), **engine_settings(self_check=False, recompute_ratio=0.05)) as engine:
        engine.add(CHUNKS)
        yield engine


def slow_loading(monkeypatch: pytest.MonkeyPatch, layer_s: float) -> None:
    own = LayerLoader.fetch_kv

    def fetch_kv(self: LayerLoader, layer: int, piece: int) -> None:
        time.sleep(layer_s)
        own(self, layer, piece)

    monkeypatch.setattr(LayerLoader, "fetch_kv", fetch_kv)


@pytest.mark.parametrize(("layer_s", "least", "most"), [(0.0, 0.05, 0.1), (0.012, 0.2, 0.6), (0.1, 1.0, 1.0)])
def test_recomputing_takes_as_long_as_loading(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch, layer_s: float, least: float, most: float
) -> None:
    # Sleeping beside other work may take longer, never shorter; 12 of 30 ms are 0.4.
    slow_loading(monkeypatch, layer_s)
    assert least <= choose_ratio(engine, [PROMPT]) <= most


def test_prompts_that_load_nothing_are_refused(engine: BlendEngine) -> None:
    for prompts in ([], [BlendPrompt("", [], words(3, 1))], [BlendPrompt("", [Chunk(words(8, 5))], words(3, 1))]):
        with pytest.raises(ConfigError, match="stored"):
            choose_ratio(engine, prompts)


def test_a_model_that_cannot_be_blended_is_refused() -> None:
    model = tiny_model("llama")
    # It then depends on more than a row and the KV before it.
    model.model.layers[3].register_forward_hook(lambda layer, args, output: output + output.mean(dim=1, keepdim=True))
    with BlendEngine(model, tiny_tokenizer(), **engine_settings()) as engine:
        with pytest.raises(UnsupportedModelError, match="off by"):
            choose_ratio(engine, [PROMPT])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=8))
def test_time_that_several_layers_are_loaded_in_counts_once(spans: list[tuple[int, int]]) -> None:
    times: dict[str, Any] = {
        "load_began": {layer: float(began) for layer, (began, _) in enumerate(spans)},
        "load_ended": {layer: float(began + length) for layer, (began, length) in enumerate(spans)},
    }
    naive = {moment for began, length in spans for moment in range(began, began + length)}
    assert loading_s(LayerTimes(**times)) == len(naive)
