"""Prompts of any make-up: ids, and the dense reference, for whatever hypothesis comes up with."""

from typing import TypeAlias

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, ChunkRef
from tests.core.dense import dense_blend
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words

Part: TypeAlias = "tuple[bool, int, int]"
"""Whether it is a chunk, its length in words, and the seed of its words."""

_MODEL = tiny_model("qwen2")
_PARTS = st.lists(st.tuples(st.booleans(), st.integers(1, 14), st.integers(0, 6)), max_size=8)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(parts=_PARTS, ending=st.integers(1, 5), stored=st.sets(st.integers(0, 7)), budget=st.integers(0, 100))
def test_any_prompt_blends_as_the_dense_reference(
    parts: list[Part], ending: int, stored: set[int], budget: int
) -> None:
    texts = [words(length, seed) for _, length, seed in parts] + [words(ending, 99)]
    segments = [Chunk(text) if chunk else text for text, (chunk, *_) in zip(texts, [*parts, (False,)], strict=True)]
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
        engine.add(
            [segment for number, segment in enumerate(segments) if isinstance(segment, Chunk) and number in stored]
        )
        result = engine.prefill(BlendPrompt(segments=segments))
    assert list(result.token_ids) == ids
    assert result.report.context_tokens == sum(stop - start for start, stop in spans)
    assert result.report.hits + result.report.misses == len(spans)
    if spans and budget < 100:
        context = result.report.context_tokens
        exact = spans[0][1] - spans[0][0] if spans[0][0] == 1 else 0
        keep = min(round(budget / 100 * context), context - exact)
        assert result.report.recomputed_tokens == keep
        # Where nothing is recomputed layer 0 is not computed in full either.
        rows, checks = (None, {1: keep}) if keep else (torch.tensor([], dtype=torch.int64), None)
        wanted = dense_blend(_MODEL, ids, spans, [1], recomputed=rows, checks=checks)
    else:
        with torch.no_grad():
            wanted = _MODEL(input_ids=torch.tensor([ids])).logits[0, -1]
    assert (result.logits - wanted).abs().max() < 2e-4


def test_a_first_chunk_is_exact_only_behind_a_prefix_that_is_where_it_was(make_engine: MakeEngine) -> None:
    engine = make_engine(selector="none", preamble="")
    engine.add([Chunk(words(20, 0), "n0")])
    segments = [(1,), ChunkRef("n0"), words(5, 2)]
    moved = BlendPrompt(segments=segments, positions=[40, 1, 60])
    ids = torch.tensor([engine.prompt_ids(moved)])
    positions = torch.tensor([[40, *range(1, 21), *range(60, 65)]])
    own = engine.model(input_ids=ids, position_ids=positions, past_key_values=DynamicCache()).logits[0, -1]
    full = engine.prefill(moved, blend=engine.blend.replace(selector="random", recompute_ratio=0.99999))
    assert (full.logits - own).abs().max() < 1e-4


def test_the_report_has_chunks_in_prompt_order(make_engine: MakeEngine) -> None:
    engine = make_engine(selector="none", encode_on="second_use")
    engine.add([Chunk(words(10, number), f"n{number}") for number in range(3)])
    engine.prefill(BlendPrompt(words(3, 4), ["n1"], words(5, 2)))
    report = engine.prefill(BlendPrompt(words(3, 4), ["n2", "n1", "n0"], words(5, 2))).report
    assert [chunk.id for chunk in report.chunks] == ["n2", "n1", "n0"]
