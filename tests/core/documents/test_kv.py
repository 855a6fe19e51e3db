"""What is stored of a chunk are its rows of one plain forward over preamble, what it is read behind, and chunk."""

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_lab import families
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from tests.core.documents.texts import TOLERANCE, Text, distances
from tests.families import CASES, FURTHER_CASES, sampled, tiny_model, tiny_tokenizer


@cache
def shared_engine(family: str, attention: str, separator: str, batch_tokens: int) -> BlendEngine:
    settings = engine_settings(separator=separator, encode_batch_tokens=batch_tokens, strict=True, self_check=False)
    return BlendEngine(tiny_model(family, attention), tiny_tokenizer(), **settings)


TEXTS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 14), min_size=1, max_size=6), st.lists(st.integers(-2, 9), min_size=5, max_size=5)
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize(("family", "attention"), sampled(CASES + FURTHER_CASES))
@given(
    shapes=TEXTS,
    separator=st.sampled_from(["", "t3 t4"]),
    batch_tokens=st.sampled_from([16, 4096]),
    pieces=st.integers(1, 8),
    seed=st.integers(0, 999),
)
@settings(max_examples=4)
def test_kv_is_that_of_a_plain_forward(
    family: str,
    attention: str,
    shapes: list[tuple[list[int], list[int]]],
    separator: str,
    batch_tokens: int,
    pieces: int,
    seed: int,
) -> None:
    check_documents(shared_engine(family, attention, separator, batch_tokens), shapes, pieces, seed)


def check_documents(engine: BlendEngine, shapes: list[tuple[list[int], list[int]]], pieces: int, seed: int) -> None:
    texts = [Text.of(f"d{n}", sizes, overlaps, seed + n) for n, (sizes, overlaps) in enumerate(shapes)]
    chunks = [chunk for text in texts for chunk in text.chunks]
    random.Random(seed).shuffle(chunks)
    try:
        for first in range(pieces):
            engine.add(chunks[first::pieces])
        for text in texts:
            assert engine.document(text.name) == [str(chunk.id) for chunk in text.chunks]
            for number in range(len(text.cuts)):
                worst = distances(engine, f"{text.name}-{number}")
                assert len(worst) == 2 and max(worst) < TOLERANCE
    finally:
        engine.delete(engine.ids())
    assert engine.store.stats().entries == 0


def test_learned_positions_are_encoded_alone() -> None:
    engine = BlendEngine(families.tiny_model(families.tiny_config("gpt2")), tiny_tokenizer())
    engine.add(Text.of("d", [5, 5], [0], 1).chunks)
    assert engine.places(["d-0", "d-1"]) == [None, None]
