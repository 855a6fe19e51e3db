"""Exactness of the mechanism on every family: whatever is selected, true KV gives the model's own logits."""

from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from cacheblend_lab.families import prove
from cacheblend_lab.settings import blend_settings, engine_settings
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fuse import BlendCache, Steering
from cacheblend_rag.fuse.selfcheck import true_kv
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model import CACHE, inspect_model
from cacheblend_rag.selection import SelectionTask, make_selector
from tests.core.dense import SPANS, dense_blend, own_kv, random_ids, read_behind, span_layout, span_prompt
from tests.engines import evict
from tests.families import CASES, FURTHER_CASES, sampled, tiny_model, tiny_tokenizer, words

TOLERANCE = 1e-4


@pytest.fixture(params=sampled(CASES + FURTHER_CASES, as_one=True), ids="-".join)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny_model(*request.param)


def test_a_family_is_exact(model: PreTrainedModel) -> None:
    """Over true KV with any rows recomputed, everything recomputed, hits or misses, and answering alone or in a batch."""
    proof = prove(model)
    assert proof.is_exact, proof


SELECTORS = [{"selector": "a3"}, {"selector": "boundary"}, {"selector": "hkvd", "check_layers": (1, 3)}]


@torch.no_grad()
@pytest.mark.parametrize("model", sampled(CASES, as_one=True), ids="-".join, indirect=True)
def test_every_selector_over_true_kv_gives_the_models_own_logits(model: PreTrainedModel) -> None:
    decoder, ids = inspect_model(model), random_ids(1)
    layout, own = span_layout(ids), [LayerKV(*kv) for kv in own_kv(model, ids)]
    wanted = model(input_ids=torch.tensor([ids])).logits[0, -1]
    for values in SELECTORS:
        selector = make_selector(blend_settings(BlendConfig(), **values).selector)
        selection = selector.begin(SelectionTask(layout, decoder.num_layers, 9))
        cache = BlendCache(decoder.num_layers)
        steering = Steering(decoder, cache, layout, selection, true_kv(own))
        with steering():
            got = model(input_ids=torch.tensor([ids]), **{CACHE: cache}, use_cache=True).logits[0, -1]
        assert (got - wanted).abs().max() < TOLERANCE, values
        assert all((kv.keys - true.keys).abs().max() < TOLERANCE for kv, true in zip(cache.kv(), own, strict=True))
        assert steering.recomputed_rows.numel() <= 9
        if values["selector"] == "boundary":
            assert steering.charge == 9 * 6


@torch.no_grad()
@pytest.mark.parametrize(
    "values",
    [
        {"selector": "hkvd", "check_layers": (1,)},
        {"selector": "hkvd", "check_layers": (1, 2, 4), "gradual_start": 1.6},
        {"selector": "random"},
    ],
    ids=["once", "gradually", "random"],
)
def test_stale_kv_is_the_dense_reference(model: PreTrainedModel, values: dict[str, Any]) -> None:
    checks = values.get("check_layers", ())
    settings = engine_settings(strict=True, recompute_ratio=0.15, **values)
    if 4 in checks and inspect_model(model).num_kv_layers < 6:
        # Its layer 4 attends to KV of layer 3 and has none to compare.
        with pytest.raises(ConfigError, match="check layer 4"):
            BlendEngine(model, tiny_tokenizer(), **settings)
        return
    with BlendEngine(model, tiny_tokenizer(), **settings) as engine:
        prompt = span_prompt(engine)
        ids, prefixes = engine.prompt_ids(prompt), read_behind(engine, prompt)
        result = engine.prefill(prompt)
    assert result.report.hits == 3
    if checks:
        # 62 chunk tokens: 9 on average; gradually, 14 at layer 1, then fewer, so that layers 1 to 5 average 9
        wanted = dense_blend(model, ids, SPANS, prefixes, checks={1: 14, 2: 10, 4: 5} if 4 in checks else {1: 9})
    else:
        task = SelectionTask(span_layout(list(ids)), model.config.num_hidden_layers, 9)
        rows = make_selector(values["selector"]).begin(task).rows
        assert rows is not None and rows.numel() == 9
        wanted = dense_blend(model, ids, SPANS, prefixes, recomputed=rows)
    assert (result.logits - wanted).abs().max() < TOLERANCE


Part: TypeAlias = "tuple[bool, int, int]"
"""Whether it is a chunk, its length in words, and the seed of its words."""

_MODEL = tiny_model("qwen2")
_PARTS = st.lists(st.tuples(st.booleans(), st.integers(1, 14), st.integers(0, 6)), max_size=8)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(parts=_PARTS, ending=st.integers(1, 5), stored=st.sets(st.integers(0, 7)), budget=st.integers(0, 100))
def test_any_prompt_is_the_dense_reference(parts: list[Part], ending: int, stored: set[int], budget: int) -> None:
    segments: list[str | Chunk] = []
    ids: list[int] = [1]
    spans: list[tuple[int, int]] = []
    for is_chunk, length, seed in [*parts, (False, ending, 99)]:
        text = words(length, seed)
        # Equal texts are one chunk.
        segments.append(Chunk(text, f"n{text}") if is_chunk else text)
        if is_chunk:
            spans.append((len(ids), len(ids) + length))
        ids += [int(word[1:]) for word in text.split()]
    settings = engine_settings(
        selector="hkvd", recompute_ratio=budget / 100, strict=True, self_check=False, preamble=""
    )
    with BlendEngine(_MODEL, tiny_tokenizer(), **settings) as engine:
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
