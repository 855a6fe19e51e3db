"""What is measured at ingestion finds the chunks that cannot be understood alone."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from cacheblend_rag import BlendConfig, BlendEngine, Chunk
from cacheblend_rag.reference import load_model, load_tokenizer
from cacheblend_rag.reference.corpus import Example, eval_examples

# At the beginning, or behind an opener such as "Most people agree that".
_PRONOUN = re.compile(r"(?:^|^[\w ]+, |^[\w ]+ that )(?:[Ss]he|[Hh]e|[Ii]t) ")


@pytest.fixture(scope="module")
def engine() -> Iterator[BlendEngine]:
    config = BlendConfig(selector="ingest", self_check=False)
    with BlendEngine(load_model(), load_tokenizer(), config=config) as engine:
        yield engine


def mean_sensitivities(engine: BlendEngine, chunks: list[Chunk]) -> list[float]:
    """Add chunks, return the average sensitivity of each one's tokens, and delete them."""
    engine.add(chunks)
    found = []
    for record in engine.records([str(chunk.id) for chunk in chunks]):
        assert record is not None
        reader = engine.store.open(record.key)
        assert reader is not None and reader.sensitivity is not None
        found.append(sum(reader.sensitivity) / len(reader.sensitivity))
    engine.delete([str(chunk.id) for chunk in chunks])
    return found


def named(example: Example) -> list[Chunk]:
    return [Chunk(text, f"chunk {number}") for number, text in enumerate(example.chunks)]


def test_chunks_that_say_only_she_are_more_sensitive(engine: BlendEngine) -> None:
    pronouns, names = [], []
    for example in eval_examples(40, seed=4):
        for text, value in zip(example.chunks, mean_sensitivities(engine, named(example)), strict=True):
            (pronouns if _PRONOUN.match(text) else names).append(value)
    assert min(len(pronouns), len(names)) >= 12
    above = sum((one > other) + (one == other) / 2 for one in pronouns for other in names)
    assert above / (len(pronouns) * len(names)) > 0.7
