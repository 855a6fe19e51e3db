"""What chunks are encoded behind where nobody says: from the chat template, the same every day, and never too long."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from cacheblend_lab.families.tiny import tiny_config
from cacheblend_lab.families.tiny import tiny_model as tiny_lab_model
from cacheblend_lab.reference import load_tokenizer
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.engine.preamble import default_preamble
from tests.core.dense import own_kv
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words

DATED = "Today is {{ strftime_now('%d %B %Y') }}.\n{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


def with_template(template: str | None) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_it_begins_as_a_chat_does() -> None:
    text = default_preamble(load_tokenizer())
    assert text.startswith("<s><|user|>\nUse the following context to answer.\n\nThe weather")
    assert text.endswith("the drought.\n")


def test_without_a_chat_template_there_is_no_opening() -> None:
    assert default_preamble(with_template(None)).startswith("Use the following context")


@pytest.mark.parametrize("template", ["{{ raise_exception('no users') }}", "{{ 'nothing of yours' }}", "{% broken"])
def test_a_template_that_shows_no_words_of_a_user(template: str) -> None:
    assert default_preamble(with_template(template)).startswith("Use the following context")


def test_it_is_the_same_tomorrow() -> None:
    text = default_preamble(with_template(DATED))
    assert text.startswith("Today is 01 January 2026.\n<user>Use the following context")
    assert f"{datetime.now():%d %B %Y}" not in text


def engine_of(family: str = "llama", **settings: Any) -> BlendEngine:
    return BlendEngine(tiny_model(family), tiny_tokenizer(), **engine_settings(self_check=False, **settings))


def test_stored_kv_was_computed_behind_it() -> None:
    with engine_of(context="none") as engine:
        preamble = engine._assembler.preamble
        # A quarter of a window of 512.
        assert len(preamble) == 128 and preamble[0] == 1
        engine.add([Chunk(words(9, 1), "a")])
        [record] = engine.records(["a"])
        assert record is not None
        reader = engine._store.open(record.key)
        assert reader is not None
        own = own_kv(engine.model, [*preamble, *record.token_ids])
        for layer, (keys, values) in enumerate(own):
            got = reader.layer(layer)
            assert (got.keys - keys[0, :, len(preamble) :]).abs().max() < 1e-4
            assert (got.values - values[0, :, len(preamble) :]).abs().max() < 1e-4


def test_a_prompt_with_another_head_is_served() -> None:
    with engine_of() as engine:
        engine.add([Chunk(words(9, 1), "a")])
        for head in ("", words(3, 2), words(30, 3)):
            assert engine.prefill(BlendPrompt(head, ["a"], "t5")).report.hits == 1


def test_who_names_another_shares_nothing() -> None:
    with engine_of() as one, engine_of(preamble="") as bare, engine_of(preamble="t5 t6") as own:
        assert bare._assembler.preamble == (1,)
        assert own._assembler.preamble == (1, 5, 6)
        assert len({one.namespace, bare.namespace, own.namespace}) == 3


def test_kv_that_cannot_be_moved_stands_behind_the_bos(make_engine: MakeEngine) -> None:
    model = tiny_lab_model(tiny_config("gpt2", vocab_size=97, max_position_embeddings=512))
    engine = make_engine(model=model, self_check=False)
    assert engine._assembler.preamble == (1,)
    engine.add([Chunk(words(9, 1), "a")])
    assert engine.prefill(BlendPrompt("", ["a"], "t5")).report.hits == 1
