"""What a prompt takes over of earlier ones: the same answers as without, and nothing behind the first difference."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cacheblend_attachments import SnapKV
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk, ChunkRef
from tests.engines import MakeEngine
from tests.families import ATTENTION, FAMILIES, FURTHER, tiny_model, tiny_tokenizer, words

ENGINE = {"strict": True, "self_check": False, "prefix_bytes": 1 << 28}
CHUNKS = [Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate((20, 22, 14, 17, 9))]
HEAD = words(10, 80)
# BOS and the head, and the two chunks and what follows them.
UP_TO_THE_FIRST_CHUNK, UP_TO_THE_SECOND_CHUNK, WHOLE = 11, 31, 11 + 42 + 9 + 5


@pytest.fixture
def make_engine(make_engine: MakeEngine) -> MakeEngine:
    def make(store: Any = None, model: Any = "llama", **settings: Any) -> BlendEngine:
        engine = make_engine(store, model, **settings)
        engine.add(CHUNKS)
        return engine

    return make


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"])


def chat(chunks: Sequence[Chunk], history: Sequence[int] = (), question: str | None = None) -> BlendPrompt:
    """A chat as LlamaIndex's context chat writes it: instructions, context, what was said, and the question."""
    asked = words(5, 1) if question is None else question
    return BlendPrompt(segments=[HEAD, *chunks, words(9, 90), tuple(history), ids_of(asked)])


def reused(engine: BlendEngine, prompt: BlendPrompt) -> int:
    return engine.generate(prompt, 1).report.prefix_tokens


def own_answer(model: PreTrainedModel, prompt_ids: Sequence[int], count: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt_ids])
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    return tuple(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist())


Segment = str | ChunkRef | tuple[int, ...]


def drawn_pair(draw: random.Random) -> tuple[list[Segment], list[Segment], bool]:
    """Return two prompts that begin alike, up to anywhere, and whether the second has the answer to the first in it."""

    def segment() -> Segment:
        kind = draw.choice(("text", "text", "ids", "chunk"))
        if kind == "chunk":
            return ChunkRef(f"n{draw.randrange(len(CHUNKS))}")
        text = words(draw.randint(1, 15), draw.randrange(10_000))
        return ids_of(text) if kind == "ids" else text

    first = [segment() for _ in range(draw.randint(1, 5))] + [words(draw.randint(1, 9), draw.randrange(10_000))]
    if draw.random() < 0.4:
        return first, [*first, segment(), words(3, 7)], draw.random() < 0.5
    place = draw.randrange(len(first))
    said, rest = first[place], draw.choice(([], first[place + 1 :]))
    if isinstance(said, str):
        spoken = said.split()
        spoken[draw.randrange(len(spoken))] = words(1, draw.randrange(99))
        return first, [*first[:place], " ".join(spoken), *rest], False
    return first, [*first[:place], segment(), *rest, words(4, 9)], False


@pytest.mark.parametrize("pairs", [40, pytest.param(1000, marks=pytest.mark.full)])
def test_answers_are_those_of_an_engine_without_sharing(make_engine: MakeEngine, pairs: int) -> None:
    sharing, lone = make_engine(), make_engine(prefix_bytes=0)
    shared = 0
    for seed in range(pairs):
        draw = random.Random(seed)
        first, second, with_answer = drawn_pair(draw)
        # What was made otherwise serves only as far as that makes no difference.
        made, blend = (
            BlendConfig(recompute_ratio=draw.choice((0.0, 0.0, 0.4, 1.0)), selector="hkvd") for _ in range(2)
        )
        answer = sharing.generate(BlendPrompt(segments=first), 4, blend=made).token_ids
        if with_answer:
            second[len(first) : len(first)] = [answer]
        asked = BlendPrompt(segments=second)
        found, wanted = (engine.generate(asked, 8, blend=blend) for engine in (sharing, lone))
        assert found.token_ids == wanted.token_ids, seed
        assert wanted.report.prefix_tokens == 0
        shared += found.report.prefix_tokens
    # Much of what is asked is known.
    assert shared > 5 * pairs


@pytest.mark.parametrize("family", [*FAMILIES, *FURTHER])
def test_a_growing_chat_has_the_models_own_answers_and_pays_for_what_is_new(
    family: str, make_engine: MakeEngine
) -> None:
    model = tiny_model(family, ATTENTION[family][0])
    engine = make_engine(model=model, recompute_ratio=1.0)
    history: list[int] = []
    for turn in range(4):
        question = words(5, 100 + turn)
        result = engine.generate(chat(CHUNKS[:1], history, question), 10)
        assert result.token_ids == own_answer(model, result.prompt_ids, 10)
        # All but the last token of the answer before, which the model has not read, and the question.
        assert result.report.prefix_tokens == (0 if turn == 0 else result.report.prompt_tokens - 5 - 1)
        history += [*ids_of(question), *result.token_ids]
    again = engine.generate(chat(CHUNKS[:1], history[: -len(result.token_ids) - 5], question), 10)
    assert (again.token_ids, again.report.prefix_tokens) == (result.token_ids, len(result.prompt_ids) - 1)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_deleted_or_replaced_chunk_leaves_nothing_behind_it(
    make_engine: MakeEngine, tmp_path: Path, ratio: float
) -> None:
    engine, other = (make_engine(tmp_path, recompute_ratio=ratio) for _ in range(2))
    reused(engine, chat(CHUNKS[:2]))
    engine.delete(["n1"])
    engine.add(CHUNKS)
    assert reused(engine, chat(CHUNKS[:2])) == UP_TO_THE_SECOND_CHUNK
    # While an answer is written.
    stream = engine.stream(chat(CHUNKS[2:4]), 60, eos_token_id=None)
    next(stream)
    engine.delete(["n2"])
    stream.result()
    engine.add(CHUNKS)
    assert reused(engine, chat(CHUNKS[2:4])) == UP_TO_THE_FIRST_CHUNK
    # Another process over the same folder: what is there again is the same, and what is another text is not.
    other.delete(["n0"])
    other.add(CHUNKS)
    assert reused(engine, chat(CHUNKS[:2])) == WHOLE - 1
    other.add([Chunk(words(20, 77), "n0")])
    asked = BlendPrompt(segments=[HEAD, ChunkRef("n0"), CHUNKS[1], words(9, 90)])
    assert reused(engine, asked) == UP_TO_THE_FIRST_CHUNK


def test_no_more_is_kept_than_the_budget_of_all_tenants(make_engine: MakeEngine) -> None:
    first, second, third = (chat(CHUNKS[:2], words_ids) for words_ids in (ids_of(words(60, seed)) for seed in range(3)))
    size = (WHOLE + 60) * make_engine().kv_bytes_per_token
    engine = make_engine(prefix_bytes=2 * size + size // 2)
    for prompt in (first, second, first, third):
        reused(engine, prompt)
    assert reused(engine, first) == WHOLE + 60 - 1
    # The one that was used least recently went, but for what the others begin with too.
    assert reused(engine, second) == WHOLE - 5
    with engine.for_tenant("other") as other:
        other.add(CHUNKS)
        # Tenants share nothing but the room.
        assert [reused(other, prompt) for prompt in (first, third, first)] == [0, WHOLE - 5, WHOLE + 60 - 1]
        assert reused(engine, second) < WHOLE + 60 - 1
    small = make_engine(prefix_bytes=size // 2)
    assert reused(small, first) == reused(small, first) == 0


def test_streams_batches_and_callers_at_once(make_engine: MakeEngine) -> None:
    engine, lone = make_engine(recompute_ratio=1.0), make_engine(recompute_ratio=1.0, prefix_bytes=0)
    stream = engine.stream(chat(CHUNKS[:2]), 400, eos_token_id=None)
    next(stream)
    stream.close()
    said = stream.result().token_ids
    result = engine.generate(chat(CHUNKS[:2], [*ids_of(words(5, 1)), *said], words(6, 2)), 8)
    assert result.token_ids == own_answer(engine.model, result.prompt_ids, 8)
    assert result.report.prefix_tokens == WHOLE + len(said) - 1
    prompts = [chat(CHUNKS[:2], ids_of(words(9, seed % 3)), words(6, seed)) for seed in range(8)]
    wanted = [lone.generate(prompt, 5).token_ids for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert [each.token_ids for each in pool.map(lambda each: engine.generate(each, 5), prompts)] == wanted
    results = engine.generate_many(prompts, 5)
    assert [each.token_ids for each in results] == wanted
    assert all(each.report.prefix_tokens == each.report.prompt_tokens - 1 for each in results)


def test_scores_places_and_dropped_rows(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = engine.prefill(chat(CHUNKS[:2]), logits_to_keep=4)
    reused(engine, chat(CHUNKS[:2]))
    # Scores are computed.
    again = engine.prefill(chat(CHUNKS[:2]), logits_to_keep=4)
    assert again.report.prefix_tokens == 0
    assert torch.equal(first.logits, again.logits)
    placed = BlendPrompt(segments=[words(20, 3)], positions=[4])
    assert reused(engine, placed) == reused(engine, placed) == 0
    engine.attach(SnapKV(24, observation_window=4))
    asked = chat(CHUNKS[2:])
    assert engine.generate(asked, 6).report.evicted_tokens > 0
    assert reused(engine, asked) <= UP_TO_THE_FIRST_CHUNK
