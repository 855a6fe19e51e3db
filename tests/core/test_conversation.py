"""Conversations: what turns take over, against the model's own generate and against a naive dense reference."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.engine import Conversation
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import open_store
from tests.core.dense import _FixedRows, stale_kv
from tests.families import ATTENTION, FAMILIES, FURTHER, tiny_model, tiny_tokenizer, words

TOLERANCE = 1e-4
LEAST_RUN = 8
BOS = 1
CHUNKS = [Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate((20, 22, 14, 17, 9))]
CONTEXT_END = words(9, 90)

MakeEngine = Callable[..., BlendEngine]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def make_engine(model: PreTrainedModel) -> Iterator[MakeEngine]:
    engines: list[BlendEngine] = []

    def make(model: PreTrainedModel = model, store: Any = None, **values: Any) -> BlendEngine:
        settings = {"strict": True, "self_check": False, "selector": "hkvd", "recompute_ratio": 0.15} | values
        engines.append(BlendEngine(model, tiny_tokenizer(), config=BlendConfig(**settings), store=store))
        engines[-1].add(CHUNKS)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(tiny_tokenizer()(text, add_special_tokens=False)["input_ids"])


def chat_prompt(chunks: Sequence[Chunk], history: Sequence[int], question: str) -> BlendPrompt:
    """A chat as LlamaIndex's context chat writes it: instructions, context, what was said, and the question."""
    return BlendPrompt(segments=[words(10, 80), *chunks, CONTEXT_END, tuple(history), ids_of(question)])


def own_answer(model: PreTrainedModel, prompt_ids: Sequence[int], count: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt_ids])
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    return tuple(model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("family", [*FAMILIES, *FURTHER])
def test_at_ratio_1_a_chat_has_the_models_own_answers(family: str, make_engine: MakeEngine) -> None:
    model = tiny_model(family, ATTENTION[family][0])
    engine = make_engine(model, recompute_ratio=1.0)
    conversation = engine.conversation()
    history: list[int] = []
    # The context grows behind the first turn's, then changes, then is gone.
    reused = []
    for turn, chunks in enumerate((CHUNKS[:1], CHUNKS[:2], [CHUNKS[3], CHUNKS[0]], [])):
        question = words(5, 100 + turn)
        result = engine.generate(chat_prompt(chunks, history, question), 10, conversation=conversation)
        assert result.token_ids == own_answer(model, result.prompt_ids, 10)
        reused.append(result.report.conversation_tokens)
        history += [*ids_of(question), *result.token_ids]
        assert conversation.tokens == len(result.prompt_ids) + len(result.token_ids) - 1
    # The instructions, and the first chunk where it stands where it stood.
    assert reused == [0, 31, 11, 11]
    # The very same prompt again: everything but its last token.
    again = engine.generate(
        chat_prompt([], history[: -len(result.token_ids) - 5], question), 10, conversation=conversation
    )
    assert again.token_ids == result.token_ids
    assert again.report.conversation_tokens == len(result.prompt_ids) - 1


@pytest.mark.parametrize("selector", ["none", "hkvd", "random", "boundary", "query", "ingest", "full"])
def test_a_turn_that_only_adds_text_is_exact_whatever_the_selector(make_engine: MakeEngine, selector: str) -> None:
    engine = make_engine(selector=selector, neighbours=1)
    conversation = engine.conversation()
    whole = engine.config.replace(recompute_ratio=1.0, selector="hkvd")
    first = engine.generate(chat_prompt(CHUNKS[:2], [], words(5, 1)), 6, config=whole, conversation=conversation)
    history = [*ids_of(words(5, 1)), *first.token_ids]
    prompt = chat_prompt(CHUNKS[:2], history, words(6, 2))
    result = engine.prefill(prompt, conversation=conversation)
    own = engine.model(input_ids=torch.tensor([result.token_ids])).logits[0, -1]
    assert (result.logits - own).abs().max() < TOLERANCE
    report = result.report
    # All that the first turn has read: everything but the last token of its answer.
    assert report.conversation_tokens == report.prompt_tokens - 6 - 1
    assert report.recomputed_tokens == report.conversation_recomputed_tokens == report.load_bytes == 0
    assert [(chunk.tier, chunk.hit, chunk.reason) for chunk in report.chunks] == [("conversation", True, None)] * 2


def rotate(keys: torch.Tensor, distance: int, theta: float = 10000.0) -> torch.Tensor:
    """The Llama rotation, by its definition: dimension i and i + d / 2 are a point that is turned."""
    half = keys.shape[-1] // 2
    angles = distance * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    points = torch.complex(keys[..., :half].double(), keys[..., half:].double()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([points.real, points.imag], dim=-1).to(keys.dtype)


class NaiveChat:
    """Turns at ratio 0, every row through every layer, with stale KV put in where it is reused."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.ids: list[int] = []
        self.kv: Pairs = []
        self.seen: list[set[str]] = []

    def forget(self, name: str) -> None:
        rows = [row for row, names in enumerate(self.seen) if name in names]
        if rows:
            self.ids, self.seen = self.ids[: rows[0]], self.seen[: rows[0]]

    def logits(self, ids: list[int], chunks: list[tuple[int, int, str]]) -> tuple[torch.Tensor, int]:
        """Return the logits behind a prompt, and how many of its tokens were taken over from the turn before."""
        taken = self._taken(ids, chunks)
        stale = stale_kv(self.model, ids, [(start, stop) for start, stop, _ in chunks], [BOS])
        seen: list[set[str]] = [set() for _ in ids]
        for start, stop, name in chunks:
            for row in range(start, stop):
                seen[row] = {name}
        for row, source in taken.items():
            for (keys, values), (old_keys, old_values) in zip(stale, self.kv, strict=True):
                keys[:, :, row] = rotate(old_keys[:, :, source], row - source)
                values[:, :, row] = old_values[:, :, source]
            seen[row] = set(self.seen[source])
        in_chunks = [row for start, stop, _ in chunks for row in range(start, stop)]
        reused = torch.tensor(sorted({*in_chunks, *taken}), dtype=torch.int64)
        cache = _FixedRows(stale, reused, reused[:0])
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]
        for row in range(1, len(ids)):
            # Computed or not, it may stand behind one that was.
            seen[row] |= seen[row - 1]
        self.ids, self.seen = ids, seen
        self.kv = [(layer.keys, layer.values) for layer in cache.layers]
        return logits, len(taken)

    def _taken(self, ids: list[int], chunks: list[tuple[int, int, str]]) -> dict[int, int]:
        end = len(ids) - 1
        first = next(
            (row for row in range(min(end, len(self.ids))) if ids[row] != self.ids[row]), min(end, len(self.ids))
        )
        first = min([first, *(start for start, stop, _ in chunks if start < first < stop)])
        first = first if first >= LEAST_RUN else 0
        taken = {row: row for row in range(first)}
        text = [
            first <= row < end and not any(start <= row < stop for start, stop, _ in chunks) for row in range(len(ids))
        ]
        row = behind = first
        while row < end:
            for source in range(behind, len(self.ids)):
                length = 0
                while (
                    text[row + length]
                    and source + length < len(self.ids)
                    and ids[row + length] == self.ids[source + length]
                ):
                    length += 1
                if length >= LEAST_RUN:
                    taken |= {row + each: source + each for each in range(length)}
                    row, behind = row + length, source + length
                    break
            else:
                row += 1
        return taken


TURNS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(range(len(CHUNKS))), max_size=3, unique=True),
        st.integers(1, 12),
        st.sampled_from(["none", "repeat", "shorten"]),
        st.sampled_from([None, *range(len(CHUNKS))]),
    ),
    min_size=2,
    max_size=5,
)


@given(turns=TURNS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_turn_is_what_a_naive_reference_makes_of_it(
    make_engine: MakeEngine, model: PreTrainedModel, turns: list[tuple[list[int], int, str, int | None]]
) -> None:
    engine = make_engine(selector="none")
    conversation, naive = engine.conversation(), NaiveChat(model)
    history: list[int] = []
    question = words(9, 7)
    for number, (places, length, habit, deleted) in enumerate(turns):
        chunks = [CHUNKS[place] for place in places]
        question = question if habit == "repeat" else words(length + 3, 200 + number)
        if habit == "shorten":
            # As a memory does that has room for so many messages.
            history = history[len(history) // 2 :]
        result = engine.prefill(chat_prompt(chunks, history, question), conversation=conversation)
        layout = engine.prompt_layout(chat_prompt(chunks, history, question))
        spans = [(span.start, span.stop, str(chunk.id)) for span, chunk in zip(layout.chunks, chunks, strict=True)]
        if not spans:
            # Without chunks it is computed as a whole, and takes exact rows only, which change nothing.
            naive.ids = []
        wanted, taken = naive.logits(list(layout.token_ids), spans)
        assert (result.logits - wanted).abs().max() < TOLERANCE
        if spans:
            assert result.report.conversation_tokens == taken
        history += [*ids_of(question), *ids_of(words(7, 300 + number))]
        if deleted is not None:
            name = f"n{deleted}"
            engine.delete([name])
            naive.forget(name)
            assert conversation.tokens == len(naive.ids)
            engine.add([CHUNKS[deleted]])
    engine.store.clear()


def test_history_behind_another_context_is_blended_like_chunks(make_engine: MakeEngine) -> None:
    engine = make_engine(recompute_ratio=0.3)
    conversation = engine.conversation()
    first = engine.generate(chat_prompt(CHUNKS[:2], [], words(12, 1)), 8, conversation=conversation)
    history = [*ids_of(words(12, 1)), *first.token_ids]
    prompt = chat_prompt(CHUNKS[2:4], history, words(6, 2))
    report = engine.generate(prompt, 4, conversation=conversation).report
    # Instructions before the context; behind it the rest of them, the question and the answer but for its last token.
    moved = 9 + 12 + 7
    assert report.conversation_tokens == 11 + moved
    assert report.context_tokens == 14 + 17
    assert report.recomputed_tokens + report.conversation_recomputed_tokens == pytest.approx(0.3 * (31 + moved), abs=1)
    assert 0 < report.conversation_recomputed_tokens < moved
    assert 0.3 < report.charged_ratio < 0.6
    assert [chunk.tier for chunk in report.chunks] == ["ram", "ram"]
    assert engine.generate(prompt, 4).report.conversation_tokens == 0


def test_the_questions_attention_is_the_same_behind_resumed_rows(make_engine: MakeEngine) -> None:
    engine = make_engine(selector="a3", recompute_ratio=0.3)
    conversation = engine.conversation()
    before = words(40, 80)
    engine.prefill(BlendPrompt(segments=[f"{before} {words(8, 81)}"]), conversation=conversation)
    prompt = BlendPrompt(segments=[f"{before} ", *CHUNKS[:3], words(9, 91)])
    turn, alone = engine.prefill(prompt, conversation=conversation), engine.prefill(prompt)
    assert turn.report.conversation_tokens == 1 + 40
    # All that is resumed is exact, so the same tokens are chosen for the same reason.
    assert [each.recomputed_tokens for each in turn.report.chunks] == [
        each.recomputed_tokens for each in alone.report.chunks
    ]
    assert (turn.logits - alone.logits).abs().max() < TOLERANCE


def test_a_question_asked_again_is_computed_again(make_engine: MakeEngine) -> None:
    engine = make_engine()
    conversation = engine.conversation()
    question = words(20, 1)
    first = engine.generate(chat_prompt(CHUNKS[:2], [], question), 4, conversation=conversation)
    history = [*ids_of(question), *first.token_ids]
    report = engine.prefill(chat_prompt(CHUNKS[:2], history, question), conversation=conversation).report
    assert report.conversation_tokens == report.prompt_tokens - 20 - 1


def _second_turn(engine: BlendEngine, conversation: Conversation, **config: Any) -> int:
    """How many tokens a turn takes over that says the same behind the same context, and more."""
    prompt = chat_prompt(CHUNKS[:2], ids_of(words(5, 1)), words(6, 2))
    settings = engine.config.replace(**config) if config else None
    return engine.prefill(prompt, config=settings, conversation=conversation).report.conversation_tokens


def _first_turn(engine: BlendEngine, conversation: Conversation, **config: Any) -> None:
    settings = engine.config.replace(**config) if config else None
    engine.prefill(chat_prompt(CHUNKS[:2], [], words(5, 1)), config=settings, conversation=conversation)


WHOLE_FIRST_TURN = 1 + 10 + 42 + 9 + 5
UP_TO_THE_FIRST_CHUNK = 1 + 10
UP_TO_THE_SECOND_CHUNK = 1 + 10 + 20


def test_rows_made_at_a_lower_ratio_are_not_taken_over(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for before, after, first_rows in ((0.15, 0.15, WHOLE_FIRST_TURN), (0.3, 0.15, WHOLE_FIRST_TURN)):
        conversation = engine.conversation()
        _first_turn(engine, conversation, recompute_ratio=before)
        assert _second_turn(engine, conversation, recompute_ratio=after) == first_rows
    conversation = engine.conversation()
    _first_turn(engine, conversation, recompute_ratio=0.15)
    # The first rows are exact; what stands behind the chunks is blended at the higher ratio.
    assert _second_turn(engine, conversation, recompute_ratio=0.3) == UP_TO_THE_FIRST_CHUNK + 9 + 5
    conversation = engine.conversation()
    _first_turn(engine, conversation, recompute_ratio=0.15)
    assert _second_turn(engine, conversation, recompute_ratio=1.0) == UP_TO_THE_FIRST_CHUNK
    # That turn was computed as a whole, so what it leaves is exact.
    assert _second_turn(engine, conversation, recompute_ratio=1.0) == WHOLE_FIRST_TURN + 6 - 1


WORSE = [
    {"selector": "none"},
    {"selector": "none", "recompute_ratio": 1.0},
    {"reposition": False},
    {"check_layers": (2,)},
    {"segment_tokens": 16},
    {"selector": "query", "look_layers": (0,), "stop_layer": 1},
]


@pytest.mark.parametrize("settings", WORSE, ids=str)
def test_rows_made_otherwise_are_not_taken_over(make_engine: MakeEngine, settings: dict[str, Any]) -> None:
    engine = make_engine(recompute_ratio=0.5)
    conversation = engine.conversation()
    _first_turn(engine, conversation, **settings)
    # What follows the chunks may be moved and blended at this turn's ratio, unless it stands behind keys at other places.
    moved = 0 if "reposition" in settings else 9 + 5
    assert _second_turn(engine, conversation) == UP_TO_THE_FIRST_CHUNK + moved
    conversation = engine.conversation()
    _first_turn(engine, conversation, **settings)
    assert _second_turn(engine, conversation, **settings) == WHOLE_FIRST_TURN


def test_plain_reuse_does_not_count_for_more_after_a_better_turn(make_engine: MakeEngine) -> None:
    engine = make_engine(recompute_ratio=0.5)
    conversation = engine.conversation()
    _first_turn(engine, conversation)
    assert _second_turn(engine, conversation, selector="none", recompute_ratio=1.0) == UP_TO_THE_FIRST_CHUNK + 9 + 5
    prompt = chat_prompt(CHUNKS[:2], ids_of(words(5, 1) + " " + words(6, 2)), words(6, 3))
    report = engine.prefill(prompt, conversation=conversation).report
    assert [chunk.tier for chunk in report.chunks] == ["ram", "ram"]
    assert report.recomputed_tokens > 0


@pytest.mark.parametrize("ratio", [0.15, 1.0])
def test_a_deleted_chunk_leaves_nothing_behind_it(make_engine: MakeEngine, ratio: float) -> None:
    engine = make_engine(recompute_ratio=ratio)
    conversation = engine.conversation()
    _first_turn(engine, conversation)
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
    engine = make_engine()
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
    _first_turn(engine, conversation)
    with BlendEngine(engine.model, engine.tokenizer, config=engine.config, store=tmp_path) as other:
        assert other.namespace == engine.namespace
        other.add([Chunk(words(11, 70), "n1")])
    assert _second_turn(engine, conversation) == UP_TO_THE_SECOND_CHUNK
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
    _first_turn(engine, conversation)
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
    _first_turn(engine, conversation)
    with engine._runner.lock:
        stream = engine.stream(chat_prompt(CHUNKS[2:], [], words(5, 1)), conversation=conversation)
        stream.close()
    stream.result()
    assert conversation.tokens == WHOLE_FIRST_TURN


def test_a_reset_forgets_also_what_is_under_way(make_engine: MakeEngine) -> None:
    engine = make_engine()
    conversation = engine.conversation()
    _first_turn(engine, conversation)
    stream = engine.stream(chat_prompt(CHUNKS[:2], [], words(6, 2)), 60, eos_token_id=None, conversation=conversation)
    next(stream)
    conversation.reset()
    assert conversation.tokens == conversation.nbytes == 0
    stream.result()
    assert conversation.tokens == 0
    assert _second_turn(engine, conversation) == 0


def test_a_reset_forgets_also_what_waits_for_the_model(make_engine: MakeEngine) -> None:
    engine = make_engine()
    conversation = engine.conversation()
    prompt = chat_prompt(CHUNKS[:2], [], words(6, 2))
    with engine._runner.lock:
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
    found: dict[int, tuple[int, ...]] = {}

    def ask(number: int) -> None:
        found[number] = engine.generate(prompts[number], 5, conversation=conversation).token_ids

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(prompts))] == wanted


def test_no_more_is_kept_than_the_budget(make_engine: MakeEngine) -> None:
    engine = make_engine()
    row_bytes = engine.decoder.kv_bytes_per_token if engine.decoder else 0
    for budget, kept in ((0, 0), (row_bytes - 1, 0), (30 * row_bytes, 30), (10_000 * row_bytes, WHOLE_FIRST_TURN)):
        conversation = engine.conversation(budget)
        _first_turn(engine, conversation)
        assert conversation.tokens == kept
        assert conversation.nbytes <= budget
    conversation = engine.conversation(30 * row_bytes)
    _first_turn(engine, conversation)
    # A chunk that is held only in part comes from the store.
    assert _second_turn(engine, conversation) == UP_TO_THE_FIRST_CHUNK


def test_all_conversations_together_keep_no_more_than_the_budget(make_engine: MakeEngine) -> None:
    whole = make_engine()
    conversation = whole.conversation()
    _first_turn(whole, conversation)
    turn_bytes = conversation.nbytes
    engine = make_engine(conversation_bytes=2 * turn_bytes)
    first, second, third = (engine.conversation() for _ in range(3))
    _first_turn(engine, first)
    _first_turn(engine, second)
    # Used again, and of the same size.
    _first_turn(engine, first)
    _first_turn(engine, third)
    assert [each.tokens for each in (first, second, third)] == [WHOLE_FIRST_TURN, 0, WHOLE_FIRST_TURN]
    assert first.nbytes + third.nbytes <= engine.config.conversation_bytes
    # What nobody has any more takes no room.
    del first
    gc.collect()
    _first_turn(engine, second)
    assert second.tokens == third.tokens == WHOLE_FIRST_TURN
    # A turn longer than all the room is cut, and its own limit cannot be wider than that.
    small = make_engine(conversation_bytes=turn_bytes // 2)
    conversation = small.conversation(10 * turn_bytes)
    _first_turn(small, conversation)
    assert 0 < conversation.nbytes <= turn_bytes // 2


def test_a_deletion_is_looked_up_once_for_all_conversations(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    conversations = [engine.conversation() for _ in range(4)]
    for conversation in conversations:
        _first_turn(engine, conversation)
    lookups: list[list[str]] = []
    lookup = engine.store.lookup

    def counting(namespace: str, ids: Sequence[str]) -> list[Any]:
        lookups.append(list(ids))
        return lookup(namespace, ids)

    monkeypatch.setattr(engine.store, "lookup", counting)
    engine.delete(["n4", "n1"])
    assert lookups == [["n1"]]
    assert [conversation.tokens for conversation in conversations] == [UP_TO_THE_SECOND_CHUNK] * 4


class Hours:
    """A clock that is put forward by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> Hours:
    """The time of stores made from now on, and of conversations."""
    hours = Hours()
    for module in ("store.clock", "engine.kept", "engine.runner"):
        monkeypatch.setattr(f"cacheblend_rag.{module}.steady_s", hours)
    monkeypatch.setattr("cacheblend_rag.store.clock.StoreClock.__init__.__defaults__", (time.time, hours))
    return hours


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("ratio", [0.15, 1.0])
def test_what_was_computed_behind_a_chunk_ends_with_its_time(
    make_engine: MakeEngine, tmp_path: Path, hours: Hours, ratio: float, on_disk: bool
) -> None:
    engine = make_engine(recompute_ratio=ratio, store=tmp_path if on_disk else None)
    engine.delete(["n0", "n1"])
    engine.add([CHUNKS[0]], ttl_s=100)
    engine.add([CHUNKS[1]], ttl_s=50)
    conversation, unrelated = engine.conversation(), engine.conversation()
    _first_turn(engine, conversation)
    engine.prefill(chat_prompt(CHUNKS[2:4], [], words(5, 1)), conversation=unrelated)
    kept = unrelated.tokens
    hours.now += 49
    assert _second_turn(engine, conversation) == WHOLE_FIRST_TURN
    hours.now += 2
    assert conversation.tokens == UP_TO_THE_SECOND_CHUNK
    # Taken over, a chunk is no younger: n0 has 49 s left.
    assert _second_turn(engine, conversation) == UP_TO_THE_SECOND_CHUNK
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


@pytest.mark.parametrize("ratio", [0.15, 1.0])
def test_what_the_conversation_has_is_a_hit_whatever_the_store_has(make_engine: MakeEngine, ratio: float) -> None:
    engine = make_engine(recompute_ratio=ratio)
    conversation = engine.conversation()
    # Exact, so that any turn takes it over.
    _first_turn(engine, conversation, recompute_ratio=1.0)
    for name in ("n1", "n2"):
        record = engine.records([name])[0]
        assert record is not None
        engine.store.discard(record.key)
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
    _first_turn(engine, conversation, kv_capacity=10)
    assert conversation.tokens == 0
    _first_turn(engine, conversation)
    assert engine.prefill(placed, conversation=conversation).report.conversation_tokens == 0
    assert _second_turn(engine, conversation, kv_capacity=10) == WHOLE_FIRST_TURN
    assert _second_turn(engine, conversation, enabled=False) == 0


def test_repair_works_on_what_was_moved(make_engine: MakeEngine) -> None:
    engine = make_engine(selector="none", repair_ratio=1.0, repair_limit=0.0)
    conversation = engine.conversation()
    first = engine.generate(chat_prompt(CHUNKS[:2], [], words(12, 1)), 8, conversation=conversation)
    history = [*ids_of(words(12, 1)), *first.token_ids]
    report = engine.generate(chat_prompt(CHUNKS[2:4], history, words(6, 2)), 6, conversation=conversation).report
    assert report.conversation_tokens > 11
    assert report.repaired_tokens > 0


def test_a_conversation_belongs_to_its_engine(make_engine: MakeEngine, tmp_path: Path) -> None:
    store = open_store(tmp_path, ram_bytes=0)
    engine, other = make_engine(store=store), make_engine()
    # The same store, model and settings, but not the same engine.
    twin = make_engine(store=store)
    assert twin.namespace == engine.namespace
    for stranger in (other, twin):
        with pytest.raises(ConfigError, match="another engine"):
            stranger.prefill(BlendPrompt(words(5, 1)), conversation=engine.conversation())
    with pytest.raises(ConfigError, match="max_bytes=-1 is negative"):
        engine.conversation(-1)
    with pytest.raises(ConfigError, match="conversation_bytes=5 cannot be set for one call"):
        engine.prefill(BlendPrompt(words(5, 1)), config=BlendConfig(conversation_bytes=5))
    for each in (engine, twin):
        each.close()
    store.close()


def test_closing_the_engine_forgets_its_conversations(make_engine: MakeEngine) -> None:
    engine = make_engine()
    conversation = engine.conversation()
    _first_turn(engine, conversation)
    engine.close()
    assert conversation.tokens == 0
