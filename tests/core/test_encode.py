"""Encoding: chunks get the KV that they have behind their own prefix, and batches waste little."""

from datetime import datetime
from typing import Any

import pytest

from cacheblend_lab.families.tiny import tiny_config
from cacheblend_lab.families.tiny import tiny_model as tiny_lab_model
from cacheblend_lab.reference import load_tokenizer
from cacheblend_rag import BlendPrompt, Chunk
from cacheblend_rag.preamble import default_preamble
from tests.engines import MakeEngine
from tests.families import tiny_tokenizer, words

ENGINE = {"self_check": False}


DATED = "Today is {{ strftime_now('%d %B %Y') }}.\n{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        (None, ""),
        ("{{ raise_exception('no users') }}", ""),
        ("{{ 'nothing of yours' }}", ""),
        ("{% broken", ""),
        # The same tomorrow.
        (DATED, "Today is 01 January 2026.\n<user>"),
    ],
)
def test_the_preamble_begins_as_a_chat_does(template: str | None, opening: str) -> None:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = template
    text = default_preamble(tokenizer)
    assert text.startswith(f"{opening}Use the following pieces of context")
    assert f"{datetime.now():%d %B %Y}" not in text
    assert default_preamble(load_tokenizer()).startswith("<s><|user|>\nUse the following pieces of context")


def test_a_prompt_with_another_head_is_served_and_who_names_another_preamble_shares_nothing(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    engine.add([Chunk(words(9, 1), "a")])
    for head in ("", words(3, 2), words(30, 3)):
        assert engine.prefill(BlendPrompt(head, ["a"], "t5")).report.hits == 1
    others = [make_engine(model=engine.model, preamble=text) for text in ("", "t5 t6")]
    assert len({each.namespace for each in (engine, *others)}) == 3
    # Where KV cannot be moved, it stands behind the BOS.
    fixed = make_engine(model=tiny_lab_model(tiny_config("gpt2", vocab_size=97, max_position_embeddings=512)))
    fixed.add([Chunk(words(9, 1), "a")])
    assert fixed.prefill(BlendPrompt("", ["a"], "t5")).report.hits == 1
