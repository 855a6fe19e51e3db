"""Prompt look-up: what is guessed, when, and that answers are what they are without."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag import BlendPrompt
from cacheblend_rag.engine.lookup import Lookup, Pace, is_clear
from tests.engines import MakeEngine
from tests.families import tiny_model

FREE = {rows: 1.0 for rows in (4, 8, 16)}


def _pace(costs: dict[int, float]) -> Pace:
    pace = Pace()
    pace.note_step(1, 1.0)
    for rows, cost in costs.items():
        for _ in range(8):
            pace.note_step(rows, cost)
    return pace


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40), st.integers(0, 20))
def test_guesses_stand_behind_what_the_answer_ends_in(prompt: list[int], answer: list[int], most: int) -> None:
    lookup = Lookup(prompt, _pace(FREE))
    for token in answer:
        lookup.add(token)
    text, guess = [*prompt, *answer], lookup.guess(most)
    assert len(guess) <= most
    if guess:
        found = [*text[-3:], *guess]
        assert any(text[at : at + len(found)] == found for at in range(len(text)))


@pytest.mark.parametrize(
    ("costs", "matched", "wanted"),
    [(FREE, 3, 15), (FREE, 30, 15), ({4: 3.0, 8: 7.0, 16: 9.0}, 3, 0), ({4: 3.0, 8: 7.0, 16: 9.0}, 30, 15)],
)
def test_as_much_is_guessed_as_pays(costs: dict[int, float], matched: int, wanted: int) -> None:
    assert _pace(costs).guesses(matched, 15) == wanted
    assert Pace().guesses(matched, 15) == Pace(0).guesses(matched, 15) == 0
    pace = _pace(costs)
    for _ in range(100):
        pace.note_guess(matched, False)
    assert pace.guesses(matched, 15) == 0


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 3}, {"repetition_penalty": 1.3}])
def test_answers_are_what_they_are_without(make_engine: MakeEngine, options: dict[str, Any]) -> None:
    engine = make_engine(model=tiny_model("qwen2"))
    plain = make_engine(model=engine.model, lookup_tokens=0)
    engine.backend.pace = _pace(FREE)  # type: ignore[attr-defined]  # of this backend
    forwards: list[int] = []
    hook = engine.model.get_input_embeddings().register_forward_hook(lambda *call: forwards.append(call[1][0].numel()))
    quoted = "the ferry to the islands leaves from the northern pier at noon. "
    for count in (1, 2, 40):
        prompt = BlendPrompt(quoted * 3)
        wanted = plain.generate(prompt, count, eos_token_id=None, **options)
        forwards.clear()
        found = engine.generate(prompt, count, eos_token_id=None, **options)
        assert (found.token_ids, found.text) == (wanted.token_ids, wanted.text)
    if not options:
        # A random model soon repeats itself.
        assert max(forwards[1:]) > 1
        assert len(forwards) < 40
    hook.remove()


def test_what_rounding_may_decide() -> None:
    assert is_clear(torch.tensor([1.0, 2.0, 0.0]), 0.9)
    assert not is_clear(torch.tensor([1.0, 2.0, 2.0]), 0.0)
