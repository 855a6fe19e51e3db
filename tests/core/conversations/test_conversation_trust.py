"""Conversations: which rows of earlier turns a turn may take over, and which must be dropped."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cacheblend_attachments import SnapKV
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.store import open_store
from tests.core.conversations.conftest import (
    CHUNKS,
    UP_TO_THE_FIRST_CHUNK,
    UP_TO_THE_SECOND_CHUNK,
    WHOLE_FIRST_TURN,
    chat_prompt,
    first_turn,
    ids_of,
    second_turn,
)
from tests.engines import MakeEngine, evict
from tests.families import words


def test_rows_made_at_a_lower_ratio_are_not_taken_over(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for before, after, first_rows in ((0.15, 0.15, WHOLE_FIRST_TURN), (0.3, 0.15, WHOLE_FIRST_TURN)):
        conversation = engine.conversation()
        first_turn(engine, conversation, recompute_ratio=before)
        assert second_turn(engine, conversation, recompute_ratio=after) == first_rows
    conversation = engine.conversation()
    first_turn(engine, conversation, recompute_ratio=0.15)
    # The first rows are exact; what stands behind the chunks is blended at the higher ratio.
    assert second_turn(engine, conversation, recompute_ratio=0.3) == UP_TO_THE_FIRST_CHUNK + 9 + 5
    conversation = engine.conversation()
    first_turn(engine, conversation, recompute_ratio=0.15)
    assert second_turn(engine, conversation, recompute_ratio=1.0) == UP_TO_THE_FIRST_CHUNK
    # That turn was computed as a whole, so what it leaves is exact.
    assert second_turn(engine, conversation, recompute_ratio=1.0) == WHOLE_FIRST_TURN + 6 - 1


WORSE = [
    {"selector": "none"},
    {"selector": "none", "recompute_ratio": 1.0},
    {"check_layers": (2,)},
    {"segment_tokens": 16},
    {"selector": "query", "look_layers": (0,), "stop_layer": 1},
]


@pytest.mark.parametrize("settings", WORSE, ids=str)
def test_rows_made_otherwise_are_not_taken_over(make_engine: MakeEngine, settings: dict[str, Any]) -> None:
    engine = make_engine(recompute_ratio=0.5)
    conversation = engine.conversation()
    first_turn(engine, conversation, **settings)
    # What follows the chunks may be moved and blended at this turn's ratio.
    assert second_turn(engine, conversation) == UP_TO_THE_FIRST_CHUNK + 9 + 5
    conversation = engine.conversation()
    first_turn(engine, conversation, **settings)
    assert second_turn(engine, conversation, **settings) == WHOLE_FIRST_TURN


def test_plain_reuse_does_not_count_for_more_after_a_better_turn(make_engine: MakeEngine) -> None:
    engine = make_engine(recompute_ratio=0.5)
    conversation = engine.conversation()
    first_turn(engine, conversation)
    assert second_turn(engine, conversation, selector="none", recompute_ratio=1.0) == UP_TO_THE_FIRST_CHUNK + 9 + 5
    prompt = chat_prompt(CHUNKS[:2], ids_of(words(5, 1) + " " + words(6, 2)), words(6, 3))
    report = engine.prefill(prompt, conversation=conversation).report
    assert [chunk.tier for chunk in report.chunks] == ["ram", "ram"]
    assert report.recomputed_tokens > 0


@pytest.mark.parametrize("ratio", [0.15, 1.0])
def test_a_deleted_chunk_leaves_nothing_behind_it(make_engine: MakeEngine, ratio: float) -> None:
    engine = make_engine(recompute_ratio=ratio)
    conversation = engine.conversation()
    first_turn(engine, conversation)
    assert conversation.tokens == WHOLE_FIRST_TURN
    engine.delete(["n4"])
    assert conversation.tokens == WHOLE_FIRST_TURN
    full_bytes = conversation.nbytes
    engine.delete(["n1"])
    assert conversation.tokens == UP_TO_THE_SECOND_CHUNK
    assert conversation.nbytes == full_bytes // WHOLE_FIRST_TURN * UP_TO_THE_SECOND_CHUNK
    # Added again with the same text, it is there again, but the conversation has forgotten it.
    engine.add(CHUNKS)
    assert conversation.tokens == UP_TO_THE_SECOND_CHUNK


def test_an_answer_that_knew_of_a_chunk_is_dropped_with_it_turns_later(make_engine: MakeEngine) -> None:
    engine = make_engine(preamble="")
    conversation = engine.conversation()
    first = engine.generate(chat_prompt(CHUNKS[:1], [], words(9, 1)), 9, conversation=conversation)
    history = [*ids_of(words(9, 1)), *first.token_ids]
    second = engine.generate(chat_prompt(CHUNKS[2:3], history, words(9, 2)), 9, conversation=conversation)
    assert second.report.conversation_tokens == 11 + 9 + 9 + 8
    # n0 is not in this prompt, but the history's KV was computed behind it: all from there on goes, n2 may stay.
    engine.delete(["n0"])
    assert conversation.tokens == 1 + 10 + 14
    history += [*ids_of(words(9, 2)), *second.token_ids]
    third = engine.prefill(chat_prompt(CHUNKS[2:3], history, words(9, 3)), conversation=conversation)
    assert third.report.conversation_tokens == 1 + 10 + 14
    engine.delete(["n2"])
    assert conversation.tokens == UP_TO_THE_FIRST_CHUNK


def test_what_another_process_deletes_or_replaces_is_not_used(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(store=tmp_path)
    conversation = engine.conversation()
    first_turn(engine, conversation)
    with BlendEngine(engine.model, engine.tokenizer, config=engine.config, store=tmp_path) as other:
        assert other.namespace == engine.namespace
        other.add([Chunk(words(11, 70), "n1")])
    assert second_turn(engine, conversation) == UP_TO_THE_SECOND_CHUNK
    store = open_store(tmp_path, ram_bytes=0)
    store.clear()
    store.close()
    conversation.refresh()
    assert conversation.tokens == UP_TO_THE_FIRST_CHUNK


def test_a_text_that_is_not_the_one_stored_under_its_id_vouches_for_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    conversation = engine.conversation()
    changed = [CHUNKS[0], Chunk(words(15, 71), "n1")]
    engine.prefill(chat_prompt(changed, [], words(5, 1)), conversation=conversation)
    assert conversation.tokens == UP_TO_THE_SECOND_CHUNK


def test_a_prompt_that_brings_another_text_under_an_id_drops_what_knew_the_old_one(make_engine: MakeEngine) -> None:
    engine = make_engine()
    conversation = engine.conversation()
    first_turn(engine, conversation)
    changed = [CHUNKS[2], Chunk(words(15, 71), "n0")]
    report = engine.prefill(chat_prompt(changed, ids_of(words(5, 1)), words(6, 2)), conversation=conversation).report
    # What was said behind the old text is not moved behind the new one.
    assert report.conversation_tokens == UP_TO_THE_FIRST_CHUNK


def test_a_deletion_while_the_turn_is_computed_is_not_missed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    conversation = engine.conversation()
    stream = engine.stream(chat_prompt(CHUNKS[:2], [], words(5, 1)), 40, eos_token_id=None, conversation=conversation)
    next(stream)
    engine.delete(["n0"])
    stream.result()
    assert conversation.tokens == UP_TO_THE_FIRST_CHUNK


@pytest.mark.parametrize("ratio", [0.15, 1.0])
def test_what_the_conversation_has_is_a_hit_whatever_the_store_has(make_engine: MakeEngine, ratio: float) -> None:
    engine = make_engine(recompute_ratio=ratio)
    conversation = engine.conversation()
    # Exact, so that any turn takes it over.
    first_turn(engine, conversation, recompute_ratio=1.0)
    evict(engine, "n1", "n2")
    report = engine.prefill(chat_prompt(CHUNKS[:2], ids_of(words(5, 1)), words(6, 2)), conversation=conversation).report
    assert (report.hits, report.misses) == (2, 0)
    assert [(chunk.hit, chunk.tier, chunk.reason) for chunk in report.chunks] == [(True, "conversation", None)] * 2
    # Elsewhere than it stood, or not there at all, it is the store that counts.
    report = engine.prefill(chat_prompt([CHUNKS[1], CHUNKS[2], CHUNKS[3]], [], words(6, 2))).report
    assert [chunk.hit for chunk in report.chunks] == [False, False, True]


def test_nothing_is_kept_of_prompts_that_are_not_whole_or_plain(make_engine: MakeEngine) -> None:
    engine = make_engine()
    conversation = engine.conversation()
    placed = BlendPrompt(segments=[words(12, 1), words(6, 2)], positions=[0, 40])
    engine.prefill(placed, conversation=conversation)
    assert conversation.tokens == 0
    with closing(engine.attach(SnapKV(10))):
        first_turn(engine, conversation)
    assert conversation.tokens == 0
    first_turn(engine, conversation)
    assert engine.prefill(placed, conversation=conversation).report.conversation_tokens == 0
    with closing(engine.attach(SnapKV(10))):
        assert second_turn(engine, conversation) == WHOLE_FIRST_TURN
    assert second_turn(engine, conversation, enabled=False) == 0
