"""Conversations: what turns take over, against the model's own generate and against a naive dense reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from cacheblend_attachments import Repair
from cacheblend_rag import BlendPrompt
from tests.core.conversations.conftest import CHUNKS, chat_prompt, ids_of, own_answer
from tests.core.dense import _FixedRows, stale_kv
from tests.engines import MakeEngine
from tests.families import ATTENTION, FAMILIES, FURTHER, tiny_model, words

TOLERANCE = 1e-4
LEAST_RUN = 8
BOS = 1
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


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


@pytest.mark.parametrize("selector", ["none", "hkvd", "random", "boundary", "query", "full"])
def test_a_turn_that_only_adds_text_is_exact_whatever_the_selector(make_engine: MakeEngine, selector: str) -> None:
    engine = make_engine(selector=selector)
    conversation = engine.conversation()
    whole = engine.blend.replace(recompute_ratio=1.0, selector="hkvd")
    first = engine.generate(chat_prompt(CHUNKS[:2], [], words(5, 1)), 6, blend=whole, conversation=conversation)
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
        first = next((r for r in range(min(end, len(self.ids))) if ids[r] != self.ids[r]), min(end, len(self.ids)))
        first = min([first, *(start for start, stop, _ in chunks if start < first < stop)])
        first = first if first >= LEAST_RUN else 0
        taken = {row: row for row in range(first)}
        text = [first <= row < end and not any(a <= row < b for a, b, _ in chunks) for row in range(len(ids))]
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
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_turn_is_what_a_naive_reference_makes_of_it(
    make_engine: MakeEngine, model: PreTrainedModel, turns: list[tuple[list[int], int, str, int | None]]
) -> None:
    engine = make_engine(selector="none", preamble="")
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
    engine._store.clear()


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
    assert [c.recomputed_tokens for c in turn.report.chunks] == [c.recomputed_tokens for c in alone.report.chunks]
    assert (turn.logits - alone.logits).abs().max() < TOLERANCE


def test_repair_works_on_what_was_moved(make_engine: MakeEngine) -> None:
    engine = make_engine(selector="none")
    engine.attach(Repair(1.0, limit=0.0))
    conversation = engine.conversation()
    first = engine.generate(chat_prompt(CHUNKS[:2], [], words(12, 1)), 8, conversation=conversation)
    history = [*ids_of(words(12, 1)), *first.token_ids]
    report = engine.generate(chat_prompt(CHUNKS[2:4], history, words(6, 2)), 6, conversation=conversation).report
    assert report.conversation_tokens > 11
    assert report.repaired_tokens > 0
