"""Positions of every kind: which KV is reused where, on models whose KV cannot be moved, or not in every prompt."""

from typing import Any

import pytest
import torch

from cacheblend_lab.families import prove, tiny_config, tiny_model
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.errors import PromptError
from cacheblend_rag.model import inspect_model
from tests.engines import MakeEngine
from tests.families import tiny_tokenizer, words

TOLERANCE = 1e-4
SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 4.0, 8.0, 16.0],
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


def scaled_model(scaling: str) -> Any:
    return tiny_model(tiny_config("llama", rope_parameters=SCALED[scaling] | {"rope_theta": 10000.0}))


@pytest.mark.parametrize("scaling", SCALED)
def test_every_scaling_is_exact(scaling: str) -> None:
    proof = prove(scaled_model(scaling))
    assert proof.refused is None and not proof.failed, proof


def test_where_frequencies_depend_on_the_length_long_prompts_are_computed_as_a_whole() -> None:
    model = scaled_model("longrope")
    chunks = [Chunk(words(count, count), f"n{count}") for count in (60, 70, 90)]
    with BlendEngine(model, tiny_tokenizer(), **engine_settings(recompute_ratio=0.3, strict=True)) as engine:
        assert engine.decoder is not None and engine.decoder.rope_reach == 256
        # A chunk beyond the reach goes to the same batch as short ones, were it not kept apart.
        engine.add([*chunks, Chunk(words(300, 1), "long")])
        short = BlendPrompt(words(3, 2), chunks[:2], words(4, 3))
        before = engine.prefill(short)
        assert before.report.fallback_reason is None and before.report.hits == 2
        long = engine.prefill(BlendPrompt(words(3, 2), chunks, words(40, 3)))
        assert long.report.fallback_reason is not None and "256" in long.report.fallback_reason
        # The long prompt has left the model with other frequencies, which must not reach what is moved afterwards.
        assert (engine.prefill(short).logits - before.logits).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["gpt2", "opt", "bart"])
def test_kv_of_learned_positions_is_reused_only_where_it_was_encoded(make_engine: MakeEngine, family: str) -> None:
    model = tiny_model(tiny_config(family))
    head = words(4, 9)
    first, second = Chunk(words(20, 1), "first"), Chunk(words(22, 2), "second")
    engine = make_engine(model=model, preamble=head, strict=True)
    assert engine.decoder is not None and not engine.decoder.is_movable
    engine.add([first, second])
    for chunks in ([first, second], [second, first]):
        prompt = BlendPrompt(head, chunks, words(5, 3))
        result = engine.prefill(prompt)
        here, elsewhere = result.report.chunks
        assert (here.hit, here.recomputed_tokens, here.reason) == (True, 0, None)
        assert elsewhere.recomputed_tokens == elsewhere.tokens
        assert elsewhere.reason is not None and "cannot be moved" in elsewhere.reason
        # Behind its own prefix the first chunk's KV is the true one, and the other was computed: nothing is approximate.
        own = model(input_ids=torch.tensor([engine.prompt_ids(prompt)])).logits[0, -1]
        assert (result.logits - own).abs().max() < TOLERANCE
    nowhere = engine.prefill(BlendPrompt(words(9, 4), [first, second], words(5, 3)))
    assert nowhere.report.fallback_reason is not None and "cannot be moved" in nowhere.report.fallback_reason


def test_a_model_that_takes_no_positions_is_not_taken_for_one_without_any() -> None:
    # The decoder of BART counts the tokens in its cache; told positions, it swallows them.
    assert not inspect_model(tiny_model(tiny_config("bart"))).is_movable
    assert inspect_model(tiny_model(tiny_config("bloom"))).is_movable


def test_a_prompt_cannot_place_its_segments_on_a_model_that_counts_for_itself(make_engine: MakeEngine) -> None:
    engine = make_engine(model=tiny_model(tiny_config("bart")))
    engine.add([Chunk(words(20, 1), "n")])
    segments = [words(3, 2), ChunkRef("n"), words(4, 3)]
    with pytest.raises(PromptError, match="positions"):
        engine.prefill(BlendPrompt(segments=segments, positions=[0, 30, 60]))
    [chunk] = engine.prefill(BlendPrompt(segments=segments)).report.chunks
    assert chunk.reason is not None and "cannot be moved" in chunk.reason
