"""Fixed text that prompts begin with: its KV is kept exactly, and like a chunk's."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_attachments import SnapKV, SourceAttention
from cacheblend_lab import families
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, ChunkRef, FixedText
from cacheblend_rag.errors import ConfigError, UnknownChunkError
from cacheblend_rag.store import open_store
from tests.core.gapped import own_logits
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words
from tests.store.kit import damage, files_of

TOLERANCE = 1e-4
HEAD = words(20, 70)
HEAD_TOKENS = 1 + 20
CHUNKS = [Chunk(words(12 + number, number), f"c{number}") for number in range(4)]
QUESTION = words(6, 90)
ALONE = BlendPrompt(segments=[FixedText(HEAD), QUESTION])

ENGINE = {"strict": True, "self_check": False, "recompute_ratio": 0.0}


def asking(*chunks: Chunk | str, question: str = QUESTION, fixed: bool = True) -> BlendPrompt:
    return BlendPrompt(FixedText(HEAD) if fixed else HEAD, chunks or CHUNKS[:2], question)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).abs().max()) < TOLERANCE


def taken(engine: BlendEngine, prompt: BlendPrompt | None = None) -> int:
    """Return how many tokens of the head were taken; what was computed of it is stored then."""
    found = engine.prefill(prompt or asking()).report.head_tokens
    engine.flush()
    return found


FAMILIES = ["llama", "gemma3", "gemma3n", "gpt-neox", "deepseek-v3", "qwen3-moe", "gpt-oss", "bloom", "gpt2", "opt"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_changes_nothing_but_the_work(make_engine: MakeEngine, family: str) -> None:
    if family in ("gpt2", "opt"):
        model = families.tiny_model(families.tiny_config(family))
    else:
        model = tiny_model(family, "eager" if family in ("gpt-oss", "bloom") else "sdpa")
    engine = make_engine(model=model, selector="hkvd")
    engine.add(CHUNKS)
    for ratio in (0.0, 0.3, 1.0):
        config = engine.blend.replace(recompute_ratio=ratio)
        plain = engine.prefill(asking(fixed=False), blend=config)
        assert plain.report.head_tokens == 0
        for _ in range(2):
            result = engine.prefill(asking(), blend=config)
            assert same(result.logits, plain.logits)
            for figure in ("charged_ratio", "recomputed_tokens", "context_tokens", "hits", "misses"):
                assert getattr(result.report, figure) == getattr(plain.report, figure), figure
        assert result.report.head_tokens == HEAD_TOKENS
    for prompt in (ALONE, asking()):
        result = engine.prefill(prompt, blend=config)
        assert (result.report.head_tokens, result.report.selector) == (HEAD_TOKENS, "full")
        assert same(result.logits, own_logits(engine.model, engine.prompt_ids(prompt)))


def test_where_none_is_taken_none_is_kept(make_engine: MakeEngine) -> None:
    engine = make_engine()
    off = engine.blend.replace(enabled=False)
    placed = BlendPrompt(segments=[FixedText(HEAD), QUESTION], positions=[0, 40])
    for _ in range(2):
        assert engine.prefill(asking(), blend=off).report.head_tokens == taken(engine, placed) == 0
    assert engine.heads() == []
    recurrent = make_engine(model=families.tiny_model(families.tiny_config("recurrent_gemma")), strict=False)
    assert [taken(recurrent), taken(recurrent)] == [0, 0]
    assert (recurrent.heads(), recurrent.store.stats().entries) == ([], 0)


def test_only_what_stands_first_is_taken(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(CHUNKS)
    fixed, ref = FixedText(HEAD), ChunkRef("c0")
    for segments, tokens in (
        ([fixed, ref, QUESTION], HEAD_TOKENS),
        # Two in a row are one.
        ([fixed, FixedText(words(5, 71)), ref, QUESTION], HEAD_TOKENS + 5),
        ([fixed, QUESTION, fixed, ref, QUESTION], HEAD_TOKENS),
        (["t5", fixed, ref, QUESTION], 0),
        ([ref, fixed, QUESTION], 0),
        ([FixedText(words(6, 5)), ref, QUESTION], 0),
        ([FixedText(words(7, 5)), ref, QUESTION], 8),
        # The last row is computed.
        ([fixed, ""], HEAD_TOKENS - 1),
        ([FixedText(""), ref, QUESTION], 0),
    ):
        taken(engine, BlendPrompt(segments=segments))
        assert taken(engine, BlendPrompt(segments=segments)) == tokens, segments


@pytest.fixture(scope="module")
def shared() -> Iterator[BlendEngine]:
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), **engine_settings(self_check=False)) as engine:
        engine.add(CHUNKS)
        yield engine


PARTS = st.tuples(st.sampled_from(["fixed", "text", "chunk"]), st.integers(0, 3), st.integers(0, 14))


@given(
    parts=st.lists(PARTS, min_size=1, max_size=6),
    ratio=st.sampled_from([0.0, 0.4, 1.0]),
    selector=st.sampled_from(["hkvd", "a3", "boundary"]),
)
@settings(max_examples=40)
def test_any_prompt_is_what_it_is_without_the_word_fixed(
    shared: BlendEngine, parts: list[tuple[str, int, int]], ratio: float, selector: str
) -> None:
    segments: list[Any] = []
    for kind, seed, length in parts:
        text = words(length, 200 + seed)
        segments.append(FixedText(text) if kind == "fixed" else CHUNKS[seed] if kind == "chunk" else text)
    plain = [each.text if isinstance(each, FixedText) else each for each in segments]
    config = shared.blend.replace(recompute_ratio=ratio, selector=selector)
    wanted = shared.prefill(BlendPrompt(segments=plain), blend=config)
    for _ in range(2):
        found = shared.prefill(BlendPrompt(segments=segments), blend=config)
        assert found.token_ids == wanted.token_ids
        assert same(found.logits, wanted.logits)
        assert found.report.charged_ratio == wanted.report.charged_ratio


def test_many_prompts_eviction_and_source_attention(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(CHUNKS)
    prompts, plain = (
        [asking(CHUNKS[n], CHUNKS[(n + 1) % 4], question=words(3 + n, 60 + n), fixed=fixed) for n in range(4)]
        for fixed in (True, False)
    )
    wanted = [engine.generate(prompt, 6).token_ids for prompt in plain]
    answers = list(engine.generate_many(prompts, 6))
    assert [answer.token_ids for answer in answers] == wanted
    # Computed for the first of them.
    assert [answer.report.head_tokens for answer in answers].count(0) == 1
    for attachment in (SnapKV(12), SourceAttention()):
        with closing(engine.attach(attachment)):
            with_head, without = (engine.generate(each[1], 6) for each in (prompts, plain))
        assert with_head.token_ids == without.token_ids
        assert with_head.report.head_tokens == HEAD_TOKENS
        assert with_head.report.evicted_tokens == without.report.evicted_tokens
        attention = [[chunk.attention for chunk in each.report.chunks] for each in (with_head, without)]
        assert attention[0] == pytest.approx(attention[1], abs=1e-4)


def test_it_is_there_after_a_restart_for_its_tenant_alone(make_engine: MakeEngine, tmp_path: Path) -> None:
    with closing(open_store(tmp_path, 10**7)) as store:
        one, two = (make_engine(store, tenant=name) for name in ("acme", "globex"))
        assert [taken(one), taken(two)] == [0, 0]
        assert not set(one.heads()) & set(two.heads())
    with closing(open_store(tmp_path, 10**7)) as store:
        one, two = (make_engine(store, tenant=name) for name in ("acme", "globex"))
        assert taken(one) == HEAD_TOKENS
        one.store.clear()
        assert one.heads() == []
        assert [taken(one), taken(two)] == [0, HEAD_TOKENS]


def test_it_is_no_chunk_and_deleting_deletes(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, other = make_engine(tmp_path), make_engine(tmp_path)
    mark = engine.changes().mark
    taken(engine, ALONE)
    [name] = engine.heads()
    assert (engine.ids(), engine.changes(mark).names) == ([], [])
    with pytest.raises(UnknownChunkError):
        engine.prefill(BlendPrompt("t5", [name], "t6"))
    with pytest.raises(ConfigError):
        engine.add([Chunk("t5", name)])
    # By another process, which this one notices.
    assert taken(other, ALONE) == HEAD_TOKENS
    assert other.delete(other.heads()) == 1
    assert (engine.heads(), files_of(tmp_path)) == ([], [])
    # While it waits to be written.
    engine.prefill(ALONE)
    assert engine.delete(engine.heads()) == 1
    engine.flush()
    assert (engine.heads(), files_of(tmp_path)) == ([], [])


@pytest.mark.parametrize(
    "tiers", [{"disk_codec": "int4"}, {"ram_codec": "int8"}, {"disk_codec": "int8", "ram_bytes": 0}]
)
def test_no_codec_takes_anything_from_it(make_engine: MakeEngine, tmp_path: Path, tiers: dict[str, Any]) -> None:
    taken(make_engine(tmp_path, **tiers), ALONE)
    # From the file, and from what it leaves in memory.
    engine = make_engine(tmp_path, **tiers)
    for _ in range(2):
        result = engine.prefill(ALONE)
        assert result.report.head_tokens == HEAD_TOKENS
        assert same(result.logits, own_logits(engine.model, engine.prompt_ids(ALONE)))
    # Damaged, it is computed anew.
    [file] = files_of(tmp_path)
    damage(file)
    engine = make_engine(tmp_path, **tiers | {"ram_bytes": 0})
    assert same(engine.prefill(ALONE).logits, own_logits(engine.model, engine.prompt_ids(ALONE)))
    engine.flush()
    assert taken(engine, ALONE) == HEAD_TOKENS


def test_nothing_of_a_question_or_history_is_kept(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    for question in ("t40 t41 t42", "t43 t44 t45"):
        engine.generate(asking(question=question), 4)
    engine.flush()
    records = engine.records([*engine.heads(), *engine.ids()])
    known = {record.token_ids for record in records if record is not None}
    assert known == {engine.prompt_ids(asking(question=QUESTION))[:HEAD_TOKENS]}
