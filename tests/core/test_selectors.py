"""Selectors that let the question choose, recompute in some layers only, or pick whole segments: against references."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cacheblend_lab.settings import blend_settings, engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.model import AttentionCall, attention_weights
from cacheblend_rag.selection import BoundarySelector, SelectionTask, selector_names
from cacheblend_rag.selection.base import pick, segment_numbers
from tests.core.dense import LENGTH, SPANS, RecordingCache, read_behind, span_prompt, stale_kv
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words

TOLERANCE = 1e-4
QUESTION = LENGTH - SPANS[-1][1]


class _Layered(RecordingCache):
    """Puts given KV in place of some rows' own, layer by layer."""

    def __init__(self, kv: list[tuple[torch.Tensor, torch.Tensor]], replaced: list[torch.Tensor]) -> None:
        super().__init__()
        self._kv = kv
        self._replaced = replaced

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: object, **kwargs: object):
        where = torch.zeros(keys.shape[2], dtype=torch.bool)
        where[self._replaced[layer]] = True
        given = self._kv[layer]
        mixed = [torch.where(where[None, None, :, None], a, b) for a, b in zip(given, (keys, values), strict=True)]
        return super().update(*mixed, layer)


@torch.no_grad()
@pytest.mark.parametrize("stop", [6, 4, 3, 2])
def test_the_question_chooses_as_in_the_dense_reference(stop: int) -> None:
    model = tiny_model("llama", "eager")
    looks, budget = (1, 2), 12
    settings = engine_settings(
        selector="query", recompute_ratio=budget / 62, look_layers=looks, stop_layer=stop, segment_tokens=1, strict=True
    )
    with BlendEngine(model, tiny_tokenizer(), **settings) as engine:
        prompt = span_prompt(engine)
        ids, prefixes = list(engine.prompt_ids(prompt)), read_behind(engine, prompt)
        result = engine.prefill(prompt)
    layers = model.config.num_hidden_layers
    stale = stale_kv(model, ids, SPANS, prefixes)
    chunk_rows = torch.cat([torch.arange(a, b) for a, b in SPANS])
    text_rows = torch.tensor([row for row in range(len(ids)) if row not in set(chunk_rows.tolist())])
    # First pass: the text over stale KV everywhere.
    head = _Layered(stale, [chunk_rows] * layers)
    states: list[torch.Tensor] = []
    hook = model.get_decoder().layers[looks[-1] + 1].register_forward_pre_hook(lambda _, args: states.append(args[0]))
    seen = model(input_ids=torch.tensor([ids]), past_key_values=head, use_cache=True, output_attentions=True).attentions
    hook.remove()
    scores = torch.zeros(chunk_rows.numel())
    for layer in looks:
        mass = seen[layer][0, :, -1][:, chunk_rows].sum(dim=0)
        scores += mass / mass.sum()
    count = round(budget * layers / stop)
    chosen = chunk_rows[scores.topk(count).indices.sort().values]
    # Second pass: the chosen rows through the layers they have missed, over the text as it was, and then all of them.
    given = [
        tuple(
            torch.where(torch.isin(torch.arange(len(ids)), text_rows)[None, None, :, None], kept, old)
            for kept, old in zip((entry.keys, entry.values), pair, strict=True)
        )
        for entry, pair in zip(head.layers, stale, strict=True)
    ]
    unchosen = chunk_rows[~torch.isin(chunk_rows, chosen)]
    missed = torch.cat((unchosen, text_rows)).sort().values
    replaced = [missed if layer <= looks[-1] else unchosen if layer < stop else chunk_rows for layer in range(layers)]
    given = [given[layer] if layer <= looks[-1] else stale[layer] for layer in range(layers)]

    def put_text_back(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0].index_copy(1, text_rows, states[0][:, text_rows]), *args[1:])

    hook = model.get_decoder().layers[looks[-1] + 1].register_forward_pre_hook(put_text_back)
    own = model(input_ids=torch.tensor([ids]), past_key_values=_Layered(given, replaced), use_cache=True).logits[0, -1]
    hook.remove()
    assert (result.logits - own).abs().max() < TOLERANCE
    assert result.report.recomputed_tokens == count
    assert result.report.charged_ratio == pytest.approx(budget / 62, rel=0.1)


@pytest.mark.parametrize("settings", [{"selector": "query"}, {"selector": "a3"}])
def test_a_model_that_does_not_show_its_attention(make_engine: MakeEngine, settings: dict[str, object]) -> None:
    config = CONFIG_MAPPING["falcon"](
        hidden_size=32, num_attention_heads=4, num_hidden_layers=6, vocab_size=97, alibi=False, parallel_attn=True
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="Falcon"):
        BlendEngine(model, tiny_tokenizer(), **engine_settings(strict=True, **settings))  # type: ignore[arg-type]
    engine = make_engine(model=model, strict=True, selector="hkvd")
    engine.add([Chunk(words(20, 0), "n0"), Chunk(words(20, 1), "n1")])
    prompt = BlendPrompt(words(4, 10), ["n0", "n1"], words(6, 12))
    assert engine.prefill(prompt).report.selector == "hkvd"
    with pytest.raises(ConfigError, match="Falcon"):
        engine.prefill(prompt, blend=blend_settings(engine.blend, **settings))


@pytest.mark.parametrize("name", [name for name in selector_names() if name != "full"])
def test_at_ratio_0_nothing_is_spent_on_choosing(name: str) -> None:
    settings = engine_settings(strict=True, selector=name, recompute_ratio=0.0)
    chunks = [Chunk(words(20, seed), f"n{seed}") for seed in range(3)]
    prompt = BlendPrompt("t5", ["n0", "n1", "n2"], "t6 t7")
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), **settings) as engine:
        engine.add(chunks)
        got = engine.prefill(prompt)
        wanted = engine.prefill(prompt, blend=engine.blend.replace(selector="none"))
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


@given(layouts(), st.integers(1, 12), st.integers(0, 40), st.randoms(use_true_random=False))
def test_whole_segments_are_picked_by_their_mean_score(layout: PromptLayout, most: int, budget: int, draw) -> None:
    rows = layout.context_rows
    scores = torch.tensor([draw.random() for _ in rows])
    picked = pick(scores, rows, budget, layout, most).tolist()
    # A segment never leaves its chunk, which is cut into as few as may be, of like length.
    numbers = segment_numbers(layout, rows, most)
    assert sorted(set(numbers.tolist())) == list(range(int(numbers.max()) + 1))
    for span in layout.chunks:
        inside = (rows >= span.start) & (rows < span.stop)
        assert not torch.isin(numbers[~inside], numbers[inside]).any()
        lengths = torch.bincount(numbers[inside] - numbers[inside][0])
        assert lengths.max() - lengths.min() <= 1 and lengths.numel() == -(-len(span) // most)
    members = [(numbers == number).nonzero().flatten().tolist() for number in range(int(numbers.max()) + 1)]
    wanted: list[int] = []
    for indices in sorted(members, key=lambda each: -float(scores[each].mean())):
        best = sorted(indices, key=lambda index: -float(scores[index]))
        wanted += best[: max(0, budget - len(wanted))]
    assert picked == sorted(rows[wanted].tolist())


@given(layouts(), st.floats(0, 1))
def test_boundary_takes_what_is_nearest_to_a_border(layout: PromptLayout, ratio: float) -> None:
    # Nothing stands before the first chunk.
    spans = [replace(span, follows=number > 0) for number, span in enumerate(layout.chunks)]
    layout = replace(layout, chunks=tuple(spans))
    candidates = layout.context_rows.tolist()
    budget = round(ratio * len(candidates))
    rows = BoundarySelector().begin(SelectionTask(layout, 4, budget)).rows().tolist()
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
