"""Encoding: a prefix computed once gives the KV of a prefix in every row, and batches waste little."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_lab.families.tiny import tiny_config
from cacheblend_lab.families.tiny import tiny_model as tiny_lab_model
from cacheblend_lab.reference import load_tokenizer
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.encode import Encoder, Target, plan_batches
from cacheblend_rag.model import Decoder, KVCache, inspect_model
from cacheblend_rag.preamble import default_preamble
from tests.engines import MakeEngine
from tests.families import CASES, sampled, tiny_model, tiny_tokenizer, words

# Longer and shorter than the sliding windows, so that some rows see the prefix and some no longer do.
LENGTHS = (40, 3, 17, 1, 40, 25)


def some_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _encoders(decoder: Decoder, prefix: list[int], batch_tokens: int) -> Iterator[Encoder]:
    """Yield one that reads the prefix before each row, and one that reads it once."""
    for shares in (False, True):
        encoder = Encoder(decoder, prefix, batch_tokens)
        encoder._shares_preamble = shares
        yield encoder


@pytest.mark.parametrize(("family", "attention"), sampled(CASES))
@torch.no_grad()
def test_a_shared_prefix_gives_each_chunk_the_kv_it_has_behind_its_own(family: str, attention: str) -> None:
    decoder = inspect_model(tiny_model(family, attention))
    chunks = [some_ids(length, seed) for seed, length in enumerate(LENGTHS)]
    for prefix in (some_ids(1, 50), some_ids(20, 51)):
        wanted = []
        for chunk in chunks:
            cache = KVCache(decoder.num_layers)
            ids = torch.tensor([[*prefix, *chunk]])
            decoder.model.get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True)
            wanted.append(cache.kv())
        for encoder in _encoders(decoder, prefix, 128):
            batches = list(encoder.encode([Target(tuple(chunk)) for chunk in chunks]))
            assert len(batches) > 1
            encoded = dict(pair for batch in batches for pair in batch)
            assert sorted(encoded) == list(range(len(chunks)))
            for index, kv in encoded.items():
                assert kv.token_ids == tuple(chunks[index])
                assert kv.start == len(prefix)
                for layer, own in zip(kv.layers, wanted[index], strict=True):
                    for stored, there in zip(layer, own, strict=True):
                        assert stored.is_contiguous()
                        assert stored.untyped_storage().nbytes() == stored.nbytes
                        assert (stored - there[0, :, len(prefix) :]).abs().max() < 1e-5 * max(1, there.abs().max())


def test_a_long_prefix_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    prefix = some_ids(24, 1)
    engine = BlendEngine(model, tiny_tokenizer(), **engine_settings(preamble=tuple(prefix), strict=True))
    rows = []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    with handle:
        for seed in range(3):
            engine.add([Chunk(words(10, seed), f"n{seed}")])
        # Right behind it, and behind a passage.
        behind = [len(each.later.behind) for each in engine.records(engine.ids()) if each is not None and each.later]
    assert rows[0] == [prefix]
    assert sorted(len(row) for batch in rows[1:] for row in batch) == sorted([10] * 3 + [each + 10 for each in behind])


@pytest.mark.parametrize(("family", "attention"), sampled(CASES))
def test_a_document_of_several_parts_is_read_behind_a_shared_prefix_as_its_own(family: str, attention: str) -> None:
    decoder = inspect_model(tiny_model(family, attention))
    first, second, third = (tuple(some_ids(length, seed)) for seed, length in enumerate((10, 8, 7)))
    targets = [Target(first), Target(second, first), Target(third, first + second[:5])]
    [[reading]] = Encoder(decoder, some_ids(20, 9), 4096).batches(targets)
    assert len(reading) == 2
    own, shared = (
        dict(pair for batch in encoder.encode(targets) for pair in batch)
        for encoder in _encoders(decoder, some_ids(20, 9), 4096)
    )
    for index, kv in own.items():
        for layer, there in zip(shared[index].layers, kv.layers, strict=True):
            for one, other in zip(layer, there, strict=True):
                assert (one - other).abs().max() < 1e-5 * max(1, other.abs().max())


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


def with_template(template: str | None) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_it_begins_as_a_chat_does() -> None:
    text = default_preamble(load_tokenizer())
    assert text.startswith("<s><|user|>\nUse the following pieces of context to answer")
    assert text.endswith(".\n\n")


def test_without_a_chat_template_there_is_no_opening() -> None:
    assert default_preamble(with_template(None)).startswith("Use the following pieces of context")


@pytest.mark.parametrize("template", ["{{ raise_exception('no users') }}", "{{ 'nothing of yours' }}", "{% broken"])
def test_a_template_that_shows_no_words_of_a_user(template: str) -> None:
    assert default_preamble(with_template(template)).startswith("Use the following pieces of context")


def test_it_is_the_same_tomorrow() -> None:
    text = default_preamble(with_template(DATED))
    assert text.startswith("Today is 01 January 2026.\n<user>Use the following pieces of context")
    assert f"{datetime.now():%d %B %Y}" not in text


def engine_of(family: str = "llama", **settings: Any) -> BlendEngine:
    return BlendEngine(tiny_model(family), tiny_tokenizer(), **engine_settings(self_check=False, **settings))


def test_a_prompt_with_another_head_is_served() -> None:
    with engine_of() as engine:
        preamble = engine._assembler.preamble
        assert preamble[0] == 1 and preamble[1:] == engine._assembler.tokenize(default_preamble(engine.tokenizer))
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
