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
from cacheblend_rag.engine import PrefillResult
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.loader.assembly import Assembly
from cacheblend_rag.trace import LayerTimes
from tests.families import tiny_model, tiny_tokenizer, words

CHUNKS = [Chunk(words(30, seed), f"n{seed}") for seed in range(2)]
PROMPT = BlendPrompt(words(4, 90), ["n0", "n1"], words(6, 91))
OTHER = BlendPrompt(words(4, 92), ["n1"], words(6, 93))
ROW_S = 5e-4
"""What a row of a layer takes to compute, besides the computation: 30 ms for the 60 chunk tokens."""


class Recorded(BlendEngine):
    """An engine that keeps the reports of its prefills."""

    def prefill(self, *args: Any, **options: Any) -> PrefillResult:
        result = super().prefill(*args, **options)
        self.__dict__.setdefault("reports", []).append(result.report)
        return result


@pytest.fixture
def engine() -> Iterator[Recorded]:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda layer, args: time.sleep(ROW_S * args[0].shape[1]))
    with Recorded(model, tiny_tokenizer(), **engine_settings(self_check=False, recompute_ratio=0.05)) as engine:
        engine.add(CHUNKS)
        yield engine


@pytest.mark.parametrize("layer_s", [0.0, 0.012, 0.1])
def test_recomputing_takes_as_long_as_loading(
    engine: Recorded, monkeypatch: pytest.MonkeyPatch, layer_s: float
) -> None:
    own = Assembly.fill
    monkeypatch.setattr(Assembly, "fill", lambda *args: (time.sleep(layer_s), own(*args))[1])
    found = choose_ratio(engine, [PROMPT, OTHER])
    # The first is a warm-up; each prompt is blended, without recomputing anything, and then prefilled in full.
    _, *reports = engine.__dict__["reports"]
    assert [each.recomputed_tokens for each in reports] == [0, 60, 0, 30]
    load_s = compute_s = 0.0
    for blended, full in zip(reports[::2], reports[1::2], strict=True):
        times = blended.trace.layers
        load_s += sum(times.load_ended[layer] - times.load_began[layer] for layer in range(6))
        compute_s += full.recompute_s / full.prompt_tokens * full.context_tokens
    assert load_s >= 12 * layer_s
    assert found == pytest.approx(min(max(load_s / compute_s, 0.05), 1))


def test_what_loads_nothing_or_cannot_be_blended_is_refused(engine: BlendEngine) -> None:
    for prompts in ([], [BlendPrompt("", [], words(3, 1))], [BlendPrompt("", [Chunk(words(8, 5))], words(3, 1))]):
        with pytest.raises(ConfigError):
            choose_ratio(engine, prompts)
    model = tiny_model("llama")
    # It then depends on more than a row and the KV before it.
    model.model.layers[3].register_forward_hook(lambda layer, args, output: output + output.mean(dim=1, keepdim=True))
    with BlendEngine(model, tiny_tokenizer(), **engine_settings()) as other, pytest.raises(UnsupportedModelError):
        choose_ratio(other, [PROMPT])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=8))
def test_time_that_several_layers_are_loaded_in_counts_once(spans: list[tuple[int, int]]) -> None:
    times: dict[str, Any] = {
        "load_began": {layer: float(began) for layer, (began, _) in enumerate(spans)},
        "load_ended": {layer: float(began + length) for layer, (began, length) in enumerate(spans)},
    }
    naive = {moment for began, length in spans for moment in range(began, began + length)}
    assert loading_s(LayerTimes(**times)) == len(naive)
