"""Eviction through the engine: answers, reports, streams, hits and misses, and settings without meaning."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cacheblend_attachments import Repair, SnapKV, SourceAttention
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from tests.families import CASES, tiny_model, tiny_tokenizer, words
from tests.store.kit import damage, files_of

CHUNKS = [Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate((20, 22, 20))]
PROMPT = BlendPrompt(words(4, 50), ["n0", "n1", "n2"], words(6, 51), words(2, 52))
CONTEXT = 20 + 2 + 22 + 2 + 20  # the chunks and the separators between them
TOKEN_BYTES = 6 * 2 * 2 * 8 * 4


@pytest.fixture
def engine() -> Iterator[BlendEngine]:
    settings = engine_settings(strict=True, selector="hkvd", recompute_ratio=0.15)
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), **settings) as engine:
        engine.add(CHUNKS)
        yield engine


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_room_for_the_whole_context_changes_no_token(family: str, attention: str) -> None:
    config = engine_settings(strict=True, selector="hkvd", recompute_ratio=0.15, self_check=False)
    with BlendEngine(tiny_model(family, attention), tiny_tokenizer(), **config) as engine:
        engine.add(CHUNKS)
        for enabled, capacity in ((True, 1.0), (False, CONTEXT)):
            settings = engine.blend.replace(enabled=enabled)
            own = engine.generate(PROMPT, 10, blend=settings, do_sample=False)
            with closing(engine.attach(SnapKV(capacity))):
                kept = engine.generate(PROMPT, 10, blend=settings, do_sample=False)
            assert kept.token_ids == own.token_ids
            assert kept.report.kv_bytes == kept.report.kv_bytes_before == own.report.kv_bytes


@pytest.mark.parametrize("enabled", [True, False])
def test_the_report_counts_what_was_evicted_after_the_first_token(engine: BlendEngine, enabled: bool) -> None:
    length, config = len(engine.prompt_ids(PROMPT)), engine.blend.replace(enabled=enabled)
    own = engine.prefill(PROMPT, blend=config)
    assert own.report.kv_bytes == own.report.kv_bytes_before == length * TOKEN_BYTES
    for capacity, kept in ((0.25, 16), (10, 10), (1, 1), (0.001, 1)):
        with closing(engine.attach(SnapKV(capacity))):
            first, answer = engine.prefill(PROMPT, blend=config), engine.generate(PROMPT, 8, blend=config)
        torch.testing.assert_close(first.logits, own.logits, atol=0, rtol=0)
        for report in (first.report, answer.report):
            assert report.evicted_tokens == CONTEXT - kept
            assert report.kv_bytes == (length - CONTEXT + kept) * TOKEN_BYTES
            assert report.kv_bytes_before == length * TOKEN_BYTES


def test_a_stream_and_each_of_many_is_what_is_generated_alone(engine: BlendEngine) -> None:
    engine.attach(SnapKV(0.25))
    wanted = engine.generate(PROMPT, 10, do_sample=False)
    stream = engine.stream(PROMPT, 10, do_sample=False)
    assert "".join(stream) == wanted.text
    many = engine.generate_many([PROMPT, PROMPT], 10, do_sample=False)
    for result in (stream.result(), *many):
        assert result.token_ids == wanted.token_ids
        assert result.report.evicted_tokens == wanted.report.evicted_tokens > 0
    assert all(result.report.alone_reason for result in many)


@pytest.mark.parametrize("end", [None, "", "  ", ()], ids=repr)
def test_a_chunk_at_the_end_is_kept(engine: BlendEngine, end: str | tuple[int, ...] | None) -> None:
    segments = [words(4, 1), ChunkRef("n0"), words(3, 2), ChunkRef("n1"), ChunkRef("n2")]
    wanted = engine.prefill(BlendPrompt(segments=segments)).logits
    engine.attach(SnapKV(10))
    result = engine.prefill(BlendPrompt(segments=segments if end is None else [*segments, end]))
    assert result.report.evicted_tokens == 20 + 3 + 22 - 10
    assert (result.logits - wanted).abs().max() < 1e-4
    report = engine.generate(BlendPrompt(segments=segments[:2]), 4).report
    assert (report.evicted_tokens, report.kv_bytes) == (0, report.kv_bytes_before)


def test_damaged_kv_found_after_layers_were_evicted_starts_anew(tmp_path: Path) -> None:
    settings = engine_settings(strict=True, ram_bytes=0)
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), **settings, store=tmp_path) as engine:
        engine.attach(SnapKV(0.25))
        engine.add(CHUNKS)
        wanted = engine.generate(PROMPT, 8, do_sample=False)
        for file in files_of(tmp_path):
            damage(file)
        again = engine.generate(PROMPT, 8, do_sample=False)
        assert again.token_ids == wanted.token_ids
        assert again.report.kv_bytes == wanted.report.kv_bytes
        assert again.report.encode_s > 0


@pytest.mark.parametrize("model_type", ["bloom", "falcon"])
@pytest.mark.parametrize("attachment", [partial(SnapKV, 5), partial(Repair, 0.1), SourceAttention])
def test_a_model_whose_attention_is_its_own_is_refused(model_type: str, attachment: Callable[[], Any]) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 1}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**sizes, eos_token_id=2, pad_token_id=0)).eval()
    with BlendEngine(model, tiny_tokenizer(), **engine_settings(enabled=False)) as engine:
        with pytest.raises(UnsupportedModelError):
            engine.attach(attachment())
        assert engine.attachments == ()


def test_what_drops_kv_stands_alone_and_one_of_a_kind(engine: BlendEngine) -> None:
    with closing(engine.attach(SnapKV(5))):
        for attachment in (Repair(0.1), SourceAttention(), SnapKV(0.5)):
            with pytest.raises(ConfigError):
                engine.attach(attachment)
        with engine.for_tenant("other") as other:
            assert [each.kv_capacity for each in other.attachments if isinstance(each, SnapKV)] == [5]
    engine.attach(Repair(0.1))
    engine.attach(SourceAttention())
    with pytest.raises(ConfigError):
        engine.attach(SnapKV(5))


NO_CAPACITY = (0, -3, 0.0, -0.5, 1.5, 512.0, float("nan"), float("inf"), True, "many", "512", None, [4])


@pytest.mark.parametrize(
    ("make", "word"),
    [
        *((partial(SnapKV, each), "kv_capacity") for each in NO_CAPACITY),
        (partial(SnapKV, 5, pooling_kernel=8), "pooling_kernel"),
        (partial(SnapKV, 5, observation_window=0), "observation_window"),
        (partial(Repair, -1), "budget"),
        (partial(Repair, 0.1, look_layers=(3, 2)), "look_layers"),
    ],
)
def test_settings_without_meaning_are_refused(make: Callable[[], Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make()
