"""Exactness of the mechanism on every family: whatever is selected, true KV gives the model's own logits."""

import random
from typing import TypeAlias

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fuse import BlendCache, Steering
from cacheblend_rag.fuse.selfcheck import true_kv
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model import inspect_model
from cacheblend_rag.selection import FixedSelection
from tests.core.dense import LENGTH, SPANS, dense_blend, own_kv, random_ids, read_behind, span_layout
from tests.engines import evict
from tests.families import CASES, FURTHER_CASES, sampled, tiny_model, tiny_tokenizer, words

TOLERANCE = 1e-4


@pytest.fixture(params=sampled(CASES + FURTHER_CASES, as_one=True), ids="-".join)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(*request.param)


@torch.no_grad()
def test_any_selection_over_true_kv_gives_the_models_own_logits(model: PreTrainedModel) -> None:
    decoder = inspect_model(model)
    ids = random_ids(1)
    layout = span_layout(ids)
    own = [LayerKV(*kv) for kv in own_kv(model, ids)]
    wanted = model(input_ids=torch.tensor([ids])).logits[0, -1]
    draw = random.Random(0)
    for ratio in (0.0, 0.05, 0.15, 0.5):
        for _ in range(5):
            rows = sorted(draw.sample(layout.context_rows.tolist(), round(ratio * layout.context_tokens)))
            cache = BlendCache(decoder.num_layers)
            selection = FixedSelection(torch.tensor(rows, dtype=torch.int64))
            steering = Steering(decoder, cache, layout, selection, true_kv(own))
            with steering():
                got = model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]
            assert (got - wanted).abs().max() < TOLERANCE
            assert steering.charge == pytest.approx(len(rows) * decoder.num_layers)
            assert [kv.keys.shape[2] for kv in cache.kv()] == [LENGTH] * decoder.num_kv_layers


def _engine(model: PreTrainedModel, **settings: object) -> BlendEngine:
    return BlendEngine(model, tiny_tokenizer(), **engine_settings(strict=True, **settings))  # type: ignore[arg-type]


def _prompt(engine: BlendEngine) -> tuple[BlendPrompt, list[tuple[int, int]]]:
    lengths = (20, 22, 20)
    engine.add([Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate(lengths)])
    prompt = BlendPrompt(
        segments=[words(4, 10), ChunkRef("n0"), ChunkRef("n1"), words(3, 11), ChunkRef("n2"), words(6, 12)]
    )
    return prompt, list(SPANS)


@torch.no_grad()
def test_ratio_one_is_the_models_own_prefill_and_generation(model: PreTrainedModel) -> None:
    with _engine(model, recompute_ratio=1.0) as engine:
        prompt, _ = _prompt(engine)
        ids = torch.tensor([engine.prompt_ids(prompt)])
        prefilled = engine.prefill(prompt)
        assert (prefilled.logits - model(input_ids=ids).logits[0, -1]).abs().max() < TOLERANCE
        assert prefilled.report.recomputed_tokens == prefilled.report.context_tokens == 62
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert engine.generate(prompt, 12, do_sample=False).token_ids == tuple(wanted[0, ids.shape[1] :].tolist())


@torch.no_grad()
@pytest.mark.parametrize(
    "settings", [{"check_layers": (1,)}, {"check_layers": (1, 2, 4), "gradual_start": 1.6}], ids=["once", "gradual"]
)
def test_hkvd_on_stale_kv_is_the_dense_reference(model: PreTrainedModel, settings: dict[str, object]) -> None:
    if settings["check_layers"] == (1, 2, 4) and inspect_model(model).num_kv_layers < 6:
        # Its layer 4 attends to KV of layer 3 and has none to compare.
        with pytest.raises(ConfigError, match="check layer 4"):
            _engine(model, selector="hkvd", **settings)
        return
    with _engine(model, recompute_ratio=0.15, selector="hkvd", **settings) as engine:
        prompt, spans = _prompt(engine)
        result = engine.prefill(prompt)
        # 62 chunk tokens: 9 on average; gradually, 14 at layer 1, then fewer, so that layers 1 to 5 average 9
        checks = {1: 9} if settings["check_layers"] == (1,) else {1: 14, 2: 10, 4: 5}
        wanted = dense_blend(model, engine.prompt_ids(prompt), spans, read_behind(engine, prompt), checks=checks)
        assert (result.logits - wanted).abs().max() < TOLERANCE
        assert result.report.hits == 3


@torch.no_grad()
def test_random_and_no_recompute_on_stale_kv_are_the_dense_reference(model: PreTrainedModel) -> None:
    with _engine(model) as engine:
        prompt, spans = _prompt(engine)
        ids = engine.prompt_ids(prompt)
        for selector in ("none", "random"):
            config = engine.blend.replace(selector=selector, recompute_ratio=0.15)
            result = engine.prefill(prompt, blend=config)
            rows = torch.tensor([], dtype=torch.int64)
            if selector == "random":
                from cacheblend_rag.selection import SelectionTask, make_selector

                task = SelectionTask(span_layout(list(ids)), model.config.num_hidden_layers, 9)
                rows = make_selector(config.selector).begin(task).rows()
                assert rows.numel() == 9
            wanted = dense_blend(model, ids, spans, read_behind(engine, prompt), recomputed=rows)
            assert (result.logits - wanted).abs().max() < TOLERANCE


Part: TypeAlias = "tuple[bool, int, int]"
"""Whether it is a chunk, its length in words, and the seed of its words."""

_MODEL = tiny_model("qwen2")
_PARTS = st.lists(st.tuples(st.booleans(), st.integers(1, 14), st.integers(0, 6)), max_size=8)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(parts=_PARTS, ending=st.integers(1, 5), stored=st.sets(st.integers(0, 7)), budget=st.integers(0, 100))
def test_any_prompt_is_the_dense_reference(parts: list[Part], ending: int, stored: set[int], budget: int) -> None:
    texts = [words(length, seed) for _, length, seed in parts] + [words(ending, 99)]
    # Equal texts are one chunk.
    segments = [
        Chunk(text, f"n{text}") if chunk else text for text, (chunk, *_) in zip(texts, [*parts, (False,)], strict=True)
    ]
    tokenizer = tiny_tokenizer()
    ids: list[int] = [1]
    spans: list[tuple[int, int]] = []
    for text, segment in zip(texts, segments, strict=True):
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        if isinstance(segment, Chunk):
            spans.append((len(ids), len(ids) + len(own)))
        ids += own
    settings = engine_settings(
        selector="hkvd", recompute_ratio=budget / 100, strict=True, self_check=False, preamble=""
    )
    with BlendEngine(_MODEL, tokenizer, **settings) as engine:
        chunks = {n: segment for n, segment in enumerate(segments) if isinstance(segment, Chunk)}
        engine.add(chunks.values())
        evict(engine, *(str(chunk.id) for n, chunk in chunks.items() if n not in stored))
        prompt = BlendPrompt(segments=segments)
        prefixes = read_behind(engine, prompt) if spans else []
        result = engine.prefill(prompt)
    assert list(result.token_ids) == ids
    assert result.report.context_tokens == sum(stop - start for start, stop in spans)
    assert result.report.hits + result.report.misses == len(spans)
    if spans and budget < 100:
        keep = round(budget / 100 * result.report.context_tokens)
        assert result.report.recomputed_tokens == keep
        # Where nothing is recomputed layer 0 is not computed in full either.
        rows, checks = (None, {1: keep}) if keep else (torch.tensor([], dtype=torch.int64), None)
        wanted = dense_blend(_MODEL, ids, spans, prefixes, recomputed=rows, checks=checks)
    else:
        with torch.no_grad():
            wanted = _MODEL(input_ids=torch.tensor([ids])).logits[0, -1]
    assert (result.logits - wanted).abs().max() < 2e-4
