"""Prompts of stored chunks compute their question and nothing else, and a prompt's first chunk gives the model's own logits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, ChunkRef, FixedText
from tests.core.documents.texts import TOLERANCE as KV_TOLERANCE
from tests.core.documents.texts import Text, distances
from tests.core.gapped import own_logits
from tests.engines import preamble_of
from tests.families import CASES, FURTHER_CASES, sampled, tiny_model, tiny_tokenizer, words

TOLERANCE = 1e-4
SEPARATOR = "t3 t4"
HEAD = words(11, 77)
QUESTION = words(7, 88)

_model = cache(tiny_model)


def engine_of(family: str = "llama", attention: str = "sdpa", store: Path | None = None, **values: Any) -> BlendEngine:
    settings = engine_settings(**{"recompute_ratio": 0.0, "strict": True, "self_check": False} | values)
    return BlendEngine(_model(family, attention), tiny_tokenizer(), **settings, store=store)


def off(engine: BlendEngine, prompt: BlendPrompt) -> float:
    """How far the engine's logits are from the model's own."""
    result = engine.prefill(prompt)
    assert result.report.charged_ratio == 0
    return float((result.logits - own_logits(engine.model, engine.prompt_ids(prompt))).abs().max())


def prompt_of(ids: Sequence[str], separator: str, head: str | FixedText = "") -> BlendPrompt:
    return BlendPrompt(head, list(ids), QUESTION, separator)


@contextmanager
def counting_rows(engine: BlendEngine) -> Iterator[list[int]]:
    """Note how many rows the last layer of a Llama computes in each forward."""
    rows: list[int] = []
    hook = engine.model.model.layers[-1].mlp.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    try:
        yield rows
    finally:
        hook.remove()


@pytest.mark.parametrize(("family", "attention"), sampled(CASES + FURTHER_CASES))
@given(
    sizes=st.lists(st.integers(4, 20), min_size=2, max_size=5),
    overlap=st.integers(-2, 4),
    separator=st.sampled_from(["", SEPARATOR]),
    preamble=st.sampled_from([None, "", HEAD]),
    batch_tokens=st.sampled_from([16, 4096]),
)
@settings(max_examples=3)
def test_what_is_stored_is_what_the_model_reads_there(
    family: str,
    attention: str,
    sizes: list[int],
    overlap: int,
    separator: str,
    preamble: str | None,
    batch_tokens: int,
) -> None:
    """A chunk right behind the head is exact; behind another one it is not."""
    document = Text.of("long", sizes, [overlap] * 4, 7)
    text = Text.of("d", sizes[:2], [0], 5)
    ids = [str(chunk.id) for chunk in text.chunks]
    given = {"separator": separator, "preamble": preamble, "encode_batch_tokens": batch_tokens}
    with engine_of(family, attention, **given) as engine:
        engine.add([*document.chunks[::-2], *text.chunks])
        engine.add(document.chunks)
        for chunk in document.chunks:
            worst = distances(engine, str(chunk.id))
            assert len(worst) == 2 and max(worst) < KV_TOLERANCE
        head = engine.tokenizer.decode(preamble_of(engine)[1:])
        for start in (head, FixedText(head)):
            for each in (ids[:1], ids[1:]):
                assert off(engine, prompt_of(each, separator, start)) < TOLERANCE
        assert off(engine, prompt_of(ids, separator, head)) > 100 * TOLERANCE
        engine.delete(ids[:1])
        assert off(engine, prompt_of(ids[1:], separator, head)) < TOLERANCE


@pytest.mark.parametrize("head", ["", HEAD, FixedText(HEAD)], ids=["none", "declared not", "fixed"])
@pytest.mark.parametrize("separator", ["", SEPARATOR])
def test_nothing_but_the_question_is_computed(tmp_path: Path, separator: str, head: str | FixedText) -> None:
    texts = [Text.of("d", [8, 9, 7], [0, 0], 1), Text.of("e", [6, 12], [0], 2)]
    ids = ["e-1", "d-0", "d-2", "e-0"]
    with engine_of(store=tmp_path, separator=separator) as engine:
        for text in texts:
            engine.add(text.chunks)
        # The head is computed once.
        engine.prefill(prompt_of(ids, separator, head))
    with engine_of(store=tmp_path, separator=separator) as engine:
        prompt = prompt_of(ids, separator, head)
        with counting_rows(engine) as rows:
            report = engine.prefill(prompt).report
        undeclared = (0 if head else 1) if not isinstance(head, str) else (1 + 11 if head else 1)
        # What stands behind the last chunk is the question's own.
        assert rows == [undeclared + 7]
        assert (report.hits, report.misses, report.charged_ratio) == (4, 0, 0.0)
        assert report.context_tokens == report.prompt_tokens - undeclared - 7 - report.head_tokens
        assert report.head_tokens == (12 if isinstance(head, FixedText) else 0)


@pytest.mark.parametrize(
    ("segments", "computed"),
    [
        # The BOS and the question, and what stands between chunks that is no separator.
        ([ChunkRef("d-0"), SEPARATOR, ChunkRef("d-1"), QUESTION], 1 + 7),
        ([ChunkRef("d-0"), ChunkRef("d-1"), QUESTION], 1 + 7),
        ([ChunkRef("d-0"), "t3", ChunkRef("d-1"), QUESTION], 1 + 1 + 7),
        ([ChunkRef("d-0"), "t3 t4 t5", ChunkRef("d-1"), QUESTION], 1 + 3 + 7),
        # A separator at the end of the prompt, however it goes on, and a chunk there.
        ([ChunkRef("d-0"), SEPARATOR, ChunkRef("d-1"), SEPARATOR], 1 + 2),
        ([ChunkRef("d-0"), SEPARATOR, ChunkRef("d-1"), SEPARATOR, " ", FixedText("")], 1 + 2),
        ([ChunkRef("d-0"), SEPARATOR, ChunkRef("d-1")], 1 + 9),
    ],
)
def test_separators_are_stored_and_other_text_is_computed(segments: list[Any], computed: int) -> None:
    with engine_of(separator=SEPARATOR, preamble="") as engine:
        engine.add(Text.of("d", [8, 9], [0], 1).chunks)
        with counting_rows(engine) as rows:
            hits = engine.prefill(BlendPrompt(segments=segments)).report.hits
        # A chunk at the end is computed.
        assert hits == (1 if isinstance(segments[-1], ChunkRef) else 2)
        assert rows == [computed]
