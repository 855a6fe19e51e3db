"""Conversations: streams, resets, budgets and times to live."""

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cacheblend_rag import BlendConfig, BlendPrompt, Chunk
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import open_store
from tests.core.conversations.conftest import (
    CHUNKS,
    UP_TO_THE_FIRST_CHUNK,
    UP_TO_THE_SECOND_CHUNK,
    WHOLE_FIRST_TURN,
    chat_prompt,
    first_turn,
    ids_of,
    own_answer,
    second_turn,
)
from tests.engines import MakeEngine
from tests.families import words


def test_a_stream_that_is_closed_leaves_what_it_has_read(make_engine: MakeEngine) -> None:
    engine = make_engine(recompute_ratio=1.0)
    conversation = engine.conversation()
    stream = engine.stream(chat_prompt(CHUNKS[:2], [], words(5, 1)), 400, eos_token_id=None, conversation=conversation)
    next(stream)
    stream.close()
    said = stream.result()
    assert conversation.tokens == WHOLE_FIRST_TURN + len(said.token_ids) - 1
    history = [*ids_of(words(5, 1)), *said.token_ids]
    result = engine.generate(chat_prompt(CHUNKS[:2], history, words(6, 2)), 8, conversation=conversation)
    assert result.token_ids == own_answer(engine.model, result.prompt_ids, 8)
    assert result.report.conversation_tokens == WHOLE_FIRST_TURN + len(said.token_ids) - 1


def test_a_stream_that_is_closed_before_its_turn_leaves_the_conversation_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    conversation = engine.conversation()
    first_turn(engine, conversation)
    with engine._runner.scheduler:
        stream = engine.stream(chat_prompt(CHUNKS[2:], [], words(5, 1)), conversation=conversation)
        stream.close()
    assert list(stream) == []
    assert conversation.tokens == WHOLE_FIRST_TURN


def test_a_reset_forgets_also_what_is_under_way(make_engine: MakeEngine) -> None:
    engine = make_engine()
    conversation = engine.conversation()
    first_turn(engine, conversation)
    stream = engine.stream(chat_prompt(CHUNKS[:2], [], words(6, 2)), 60, eos_token_id=None, conversation=conversation)
    next(stream)
    conversation.reset()
    assert conversation.tokens == conversation.nbytes == 0
    stream.result()
    assert conversation.tokens == 0
    assert second_turn(engine, conversation) == 0


def test_a_reset_forgets_also_what_waits_for_the_model(make_engine: MakeEngine) -> None:
    engine = make_engine()
    conversation = engine.conversation()
    prompt = chat_prompt(CHUNKS[:2], [], words(6, 2))
    with engine._runner.scheduler:
        stream = engine.stream(prompt, 4, conversation=conversation)
        conversation.reset()
    stream.result()
    assert conversation.tokens == 0
    engine.prefill(prompt, conversation=conversation)
    assert conversation.tokens == len(engine.prompt_ids(prompt))


def test_turns_at_once_are_as_good_as_one_after_the_other(make_engine: MakeEngine) -> None:
    engine = make_engine(recompute_ratio=1.0)
    conversation = engine.conversation()
    prompts = [chat_prompt(CHUNKS[:2], ids_of(words(9, seed % 3)), words(6, seed)) for seed in range(8)]
    wanted = [engine.generate(prompt, 5).token_ids for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = pool.map(lambda each: engine.generate(each, 5, conversation=conversation).token_ids, prompts)
    assert list(found) == wanted


def test_no_more_is_kept_than_the_budget(make_engine: MakeEngine) -> None:
    engine = make_engine()
    row_bytes = engine.decoder.kv_bytes_per_token if engine.decoder else 0
    for budget, kept in ((0, 0), (row_bytes - 1, 0), (30 * row_bytes, 30), (10_000 * row_bytes, WHOLE_FIRST_TURN)):
        conversation = engine.conversation(budget)
        first_turn(engine, conversation)
        assert conversation.tokens == kept
        assert conversation.nbytes <= budget
    conversation = engine.conversation(30 * row_bytes)
    first_turn(engine, conversation)
    # A chunk that is held only in part comes from the store.
    assert second_turn(engine, conversation) == UP_TO_THE_FIRST_CHUNK


def test_all_conversations_together_keep_no_more_than_the_budget(make_engine: MakeEngine) -> None:
    whole = make_engine()
    conversation = whole.conversation()
    first_turn(whole, conversation)
    turn_bytes = conversation.nbytes
    engine = make_engine(conversation_bytes=2 * turn_bytes)
    first, second, third = (engine.conversation() for _ in range(3))
    first_turn(engine, first)
    first_turn(engine, second)
    # Used again, and of the same size.
    first_turn(engine, first)
    first_turn(engine, third)
    assert [each.tokens for each in (first, second, third)] == [WHOLE_FIRST_TURN, 0, WHOLE_FIRST_TURN]
    assert first.nbytes + third.nbytes <= engine.config.conversation_bytes
    # What nobody has any more takes no room.
    del first
    gc.collect()
    first_turn(engine, second)
    assert second.tokens == third.tokens == WHOLE_FIRST_TURN
    # A turn longer than all the room is cut, and its own limit cannot be wider than that.
    small = make_engine(conversation_bytes=turn_bytes // 2)
    conversation = small.conversation(10 * turn_bytes)
    first_turn(small, conversation)
    assert 0 < conversation.nbytes <= turn_bytes // 2


class Hours:
    """A clock that is put forward by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Hours:
    hours = Hours()
    monkeypatch.setattr(time, "time", hours)
    return hours


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("ratio", [0.15, 1.0])
def test_rows_end_at_chunks(make_engine: MakeEngine, tmp_path: Path, hours: Hours, ratio: float, on_disk: bool) -> None:
    engine = make_engine(recompute_ratio=ratio, store=tmp_path if on_disk else None)
    engine.delete(["n0", "n1"])
    engine.add([CHUNKS[0]], ttl_s=100)
    engine.add([CHUNKS[1]], ttl_s=50)
    conversation, unrelated = engine.conversation(), engine.conversation()
    first_turn(engine, conversation)
    engine.prefill(chat_prompt(CHUNKS[2:4], [], words(5, 1)), conversation=unrelated)
    kept = unrelated.tokens
    hours.now += 49
    assert second_turn(engine, conversation) == WHOLE_FIRST_TURN
    hours.now += 2
    assert conversation.tokens == UP_TO_THE_SECOND_CHUNK
    # Taken over, a chunk is no younger: n0 has 49 s left.
    assert second_turn(engine, conversation) == UP_TO_THE_SECOND_CHUNK
    hours.now += 50
    assert conversation.tokens == UP_TO_THE_FIRST_CHUNK
    report = engine.prefill(chat_prompt(CHUNKS[:2], [], words(5, 1)), conversation=conversation).report
    assert report.chunks[0].tier != "conversation"
    assert unrelated.tokens == kept


def test_misses_live_in_conversations_as_long_as_in_the_store(make_engine: MakeEngine, hours: Hours) -> None:
    engine = make_engine(ttl_s=100)
    nameless = [Chunk(words(20, 61)), Chunk(words(20, 62))]
    conversation = engine.conversation()
    engine.prefill(chat_prompt(nameless, [], words(5, 1)), conversation=conversation)
    hours.now += 99
    assert conversation.tokens == 1 + 10 + 40 + 9 + 5
    hours.now += 2
    assert conversation.tokens == UP_TO_THE_FIRST_CHUNK


def test_a_conversation_belongs_to_its_engine(make_engine: MakeEngine, tmp_path: Path) -> None:
    store = open_store(tmp_path, ram_bytes=0)
    engine, other = make_engine(store=store), make_engine()
    # The same store, model and settings, but not the same engine.
    twin = make_engine(store=store)
    assert twin.namespace == engine.namespace
    for stranger, conversation in ((other, engine.conversation()), (twin, engine.conversation()), (engine, "mine")):
        with pytest.raises(ConfigError, match="another engine"):
            stranger.prefill(BlendPrompt(words(5, 1)), conversation=conversation)
    with pytest.raises(ConfigError, match="max_bytes=-1 is negative"):
        engine.conversation(-1)
    with pytest.raises(ConfigError, match="conversation_bytes is fixed when an engine is made"):
        BlendConfig(conversation_bytes=5)
    for each in (engine, twin):
        each.close()
    store.close()


def test_closing_the_engine_forgets_its_conversations(make_engine: MakeEngine) -> None:
    engine = make_engine()
    conversation = engine.conversation()
    first_turn(engine, conversation)
    engine.close()
    assert conversation.tokens == 0
