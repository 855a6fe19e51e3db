"""Earlier prompts in llama.cpp's cells: the answers are those without them, and there is always room for the next one."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cacheblend_gguf import GGUFEngine
from cacheblend_rag import BlendPrompt, Chunk, ChunkRef, EngineConfig
from cacheblend_rag.prefixes import drop_oldest
from integrations.gguf.tests.kit import HARBOUR, ask, assert_same_answer, harbour, last_scores

WORDS = " ".join(HARBOUR).split()


@pytest.fixture
def sharing(engine: GGUFEngine) -> Iterator[GGUFEngine]:
    with engine.another(config=EngineConfig()) as sharing:
        sharing.add(harbour())
        yield sharing


def text(draw: random.Random, most: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, most)))


@pytest.mark.parametrize("pairs", [6, pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(1800)])])
def test_answers_are_those_of_an_engine_without_sharing(engine: GGUFEngine, sharing: GGUFEngine, pairs: int) -> None:
    engine.add(harbour())
    shared = 0
    for seed in range(pairs):
        draw = random.Random(seed)
        first = [text(draw, 20), *(ChunkRef(f"h{draw.randrange(4)}") for _ in range(draw.randrange(3))), text(draw, 20)]
        answer = sharing.generate(BlendPrompt(segments=first), 3).token_ids
        place = draw.randrange(len(first))
        second = draw.choice(
            (
                first,
                [*first, answer, text(draw, 9)],
                [*first[:place], text(draw, 9)],
                [*first[:place], ChunkRef(f"h{draw.randrange(4)}"), *first[place + 1 :], " And?"],
                [" ".join([draw.choice(WORDS), *str(first[0]).split()[1:]]), *first[1:]],
            )
        )
        with last_scores(engine) as scores:
            wanted = engine.generate(BlendPrompt(segments=second), 6, eos_token_id=[])
        found = sharing.generate(BlendPrompt(segments=second), 6, eos_token_id=[])
        assert wanted.report.prefix_tokens == 0
        shared += found.report.prefix_tokens
        assert_same_answer(engine, found, wanted, scores)
    assert shared > 10 * pairs


def test_a_chat_pays_for_what_is_new(sharing: GGUFEngine) -> None:
    said: list[int] = list(sharing.prompt_ids(BlendPrompt("You keep the harbour of Lund, and answer in a word.")))
    for turn in range(6):
        question = sharing.prompt_ids(BlendPrompt(segments=[f"\nQuestion {turn}: when does it close?\nAnswer:"]))[1:]
        result = sharing.generate(BlendPrompt(segments=[(*said, *question)]), 6)
        assert result.report.prefix_tokens == (0 if turn == 0 else len(said) - 1)
        said = [*result.prompt_ids, *result.token_ids]
    again = sharing.generate(BlendPrompt(segments=[tuple(result.prompt_ids)]), 6)
    assert (again.token_ids, again.report.prefix_tokens) == (result.token_ids, len(result.prompt_ids) - 1)


def test_what_a_deleted_chunk_was_read_by_is_gone(sharing: GGUFEngine) -> None:
    sharing.add([Chunk("The cats of Lund sleep at noon, and wake when the fish comes in.", "cats")])
    prompt = BlendPrompt(segments=["Read all of this before you answer. ", ChunkRef("h0"), ChunkRef("cats"), "\nWhat?"])
    with last_scores(sharing) as scores:
        first = sharing.generate(prompt, 4)
    second = sharing.generate(prompt, 4)
    assert second.report.prefix_tokens == len(first.prompt_ids) - 1
    assert [chunk.tier for chunk in second.report.chunks] == ["prefix", "prefix"]
    sharing.delete(["cats"])
    sharing.add([Chunk("The cats of Lund sleep at noon, and wake when the fish comes in.", "cats")])
    third = sharing.generate(prompt, 4)
    assert third.report.chunks[0].tier == "prefix"
    assert third.report.chunks[1].tier != "prefix"
    assert_same_answer(sharing, third, first, scores)


def test_what_a_waiting_prompt_would_have_shared_may_go(path: Path) -> None:
    prompt = BlendPrompt(" ".join(HARBOUR))
    with GGUFEngine.from_pretrained(path, n_ctx=1024, n_seq_max=1) as engine, ThreadPoolExecutor(1) as pool:
        with last_scores(engine) as scores:
            first = engine.generate(prompt, 8)
        other = engine.stream(BlendPrompt("Once upon a time there was"), 200, eos_token_id=[])
        next(other)
        waiting = pool.submit(engine.generate, prompt, 8)
        for _ in range(20):
            next(other)
        while drop_oldest(engine.llama.kept):
            pass
        other.close()
        result = waiting.result()
        assert result.report.prefix_tokens == 0
        assert_same_answer(engine, result, first, scores)


def test_there_is_always_room(path: Path) -> None:
    with GGUFEngine.from_pretrained(path, n_ctx=512, n_seq_max=3) as engine, engine.for_tenant("other") as other:
        draw, engines = random.Random(5), (engine, other)
        for each in engines:
            each.add(harbour())

        def call(number: int) -> int:
            ids = [f"h{draw.randrange(4)}" for _ in range(draw.randrange(4))]
            head = "Read this. " * draw.randrange(20)
            prompt = BlendPrompt(segments=[head or "a", *map(ChunkRef, ids), text(draw, 60)])
            return len(engines[number % 2].generate(prompt, draw.randint(1, 30), eos_token_id=[]).token_ids)

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(call, range(8)))
        # A prompt that fills the window, and goes on: what it shares is not counted twice.
        ids = engine.prompt_ids(BlendPrompt(segments=[" ".join(draw.choice(WORDS) for _ in range(380))]))[:430]
        first = engine.generate(BlendPrompt(segments=[ids]), 8, eos_token_id=[])
        longer = engine.generate(BlendPrompt(segments=[(*first.prompt_ids, *first.token_ids)]), 8, eos_token_id=[])
        assert longer.report.prefix_tokens == len(first.prompt_ids) + 7
        assert engine.generate(ask("h0", "h1"), 4).token_ids
