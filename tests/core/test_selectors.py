"""Selectors against references."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.model import AttentionCall, attention_weights
from cacheblend_rag.selection import BoundarySelector, SelectionTask, selector_names
from tests.core.dense import LENGTH, SPANS, span_prompt
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words

QUESTION = LENGTH - SPANS[-1][1]


def test_a_model_that_does_not_show_its_attention(make_engine: MakeEngine) -> None:
    config = CONFIG_MAPPING["falcon"](
        hidden_size=32, num_attention_heads=4, num_hidden_layers=6, vocab_size=97, alibi=False, parallel_attn=True
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="Falcon"):
        BlendEngine(model, tiny_tokenizer(), **engine_settings(strict=True, selector="a3"))
    engine = make_engine(model=model, strict=True, selector="hkvd")
    engine.add([Chunk(words(20, 0), "n0"), Chunk(words(20, 1), "n1")])
    prompt = BlendPrompt(words(4, 10), ["n0", "n1"], words(6, 12))
    assert engine.prefill(prompt).report.selector == "hkvd"
    with pytest.raises(ConfigError, match="Falcon"):
        engine.prefill(prompt, blend=engine.blend.replace(selector="a3"))


@pytest.mark.parametrize("name", selector_names())
def test_at_ratio_0_nothing_is_spent_on_choosing(name: str) -> None:
    settings = engine_settings(strict=True, selector=name, recompute_ratio=0.0)
    chunks = [Chunk(words(20, seed), f"n{seed}") for seed in range(3)]
    prompt = BlendPrompt("t5", ["n0", "n1", "n2"], "t6 t7")
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), **settings) as engine:
        engine.add(chunks)
        got = engine.prefill(prompt)
        wanted = engine.prefill(prompt, blend=engine.blend.replace(selector="boundary"))
    assert got.report.charged_ratio == 0.0
    torch.testing.assert_close(got.logits, wanted.logits, atol=0, rtol=0)


@st.composite
def layouts(draw: st.DrawFn) -> PromptLayout:
    spans, at = [], draw(st.integers(1, 4))
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 30))
        spans.append(ChunkSpan(at, at + length, at))
        at += length + draw(st.integers(0, 3))
    return PromptLayout(tuple(range(at + 2)), tuple(range(at + 2)), tuple(spans), draw(st.integers(0, 1)))


@given(layouts(), st.floats(0, 1))
def test_boundary_takes_what_is_nearest_to_a_border(layout: PromptLayout, ratio: float) -> None:
    # Nothing stands before the first chunk.
    spans = [replace(span, follows=number > 0) for number, span in enumerate(layout.chunks)]
    layout = replace(layout, chunks=tuple(spans))
    candidates = layout.context_rows.tolist()
    budget = round(ratio * len(candidates))
    rows = BoundarySelector().begin(SelectionTask(layout, 4, budget)).rows.tolist()
    assert rows == sorted(set(rows)) and len(rows) == budget
    assert set(rows) <= set(candidates)

    def distance(row: int) -> int:
        span = next(span for span in layout.chunks if span.start <= row < span.stop)
        # The prompt's first comes last.
        return row - span.start + (0 if span.follows else len(layout))

    left = [distance(row) for row in candidates if row not in rows]
    assert not rows or not left or max(map(distance, rows)) <= min(left)


@torch.no_grad()
def test_a3_chooses_by_the_fresh_keys_of_layer_1() -> None:
    model = tiny_model("llama", "eager")
    settings = engine_settings(selector="a3", recompute_ratio=9 / 62, strict=True)
    with BlendEngine(model, tiny_tokenizer(), **settings) as engine:
        prompt = span_prompt(engine)
        ids = list(engine.prompt_ids(prompt))
        report = engine.prefill(prompt).report
    chunk_rows = torch.cat([torch.arange(a, b) for a, b in SPANS])
    attention = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions[1][0]
    mass = attention[:, -QUESTION:].sum(dim=(0, 1))[chunk_rows]
    chosen = set(chunk_rows[mass.topk(9).indices].tolist())
    wanted = [len(chosen & set(range(a, b))) for a, b in SPANS]
    assert [chunk.recomputed_tokens for chunk in report.chunks] == wanted


def test_half_precision_does_not_overflow_where_the_kernel_does_not() -> None:
    query = torch.full((1, 1, 1, 128), 24.0, dtype=torch.float16)
    key = torch.full((1, 1, 3, 128), 24.0, dtype=torch.float16)
    weights = attention_weights(AttentionCall(query, key, None, 128**-0.5), 1)
    assert (weights - 1 / 3).abs().max() < 1e-3
