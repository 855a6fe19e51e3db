"""Encoding: chunks get the KV that they have behind their own prefix, and batches waste little."""

from datetime import datetime
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_lab.families.tiny import tiny_config
from cacheblend_lab.families.tiny import tiny_model as tiny_lab_model
from cacheblend_lab.reference import load_tokenizer
from cacheblend_rag import BlendPrompt, Chunk
from cacheblend_rag.encode import plan_batches
from cacheblend_rag.preamble import default_preamble
from tests.engines import MakeEngine
from tests.families import tiny_tokenizer, words

ENGINE = {"self_check": False}


def some_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_long_prefix_is_run_once(make_engine: MakeEngine) -> None:
    prefix = some_ids(24, 1)
    engine = make_engine(preamble=tuple(prefix))
    rows: list[list[int]] = []
    engine.model.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: rows.extend(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    for seed in range(3):
        engine.add([Chunk(words(10, seed), f"n{seed}")])
    assert [row for row in rows if row[: len(prefix)] == prefix] == [prefix]


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(0, 30), st.integers(1, 200))
def test_every_chunk_is_in_one_batch_that_fits(lengths: list[int], prefix_len: int, batch_tokens: int) -> None:
    batches = plan_batches(lengths, prefix_len, batch_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        width = prefix_len + max(lengths[index] for index in batch)
        assert len(batch) == 1 or len(batch) * width <= batch_tokens
        # A batch that is planned again, as it is once some of it is no longer wanted, stays in one piece.
        assert len(plan_batches([lengths[index] for index in batch], prefix_len, batch_tokens)) == 1


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
