"""Texts that come in pieces: they are the text, whatever the tokenizer, and end before the stop string that begins first."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessor

from cacheblend_lab.reference import load_tokenizer
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt
from cacheblend_rag.stops import Spelling, StopCutter, cut_at_stop, cut_pieces
from tests.core.test_lexer import sentence_pieces
from tests.families import tiny_reader


@given(st.text("abn", max_size=30), st.lists(st.text("abn", min_size=1, max_size=5), max_size=3), st.data())
def test_cutting_pieces_equals_cutting_the_text(text: str, stops: list[str], data: st.DataObject) -> None:
    # The stop string that begins first counts, whichever is complete first.
    wanted = text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
    assert cut_at_stop(text, stops) == "".join(cut_pieces(text, StopCutter(stops))) == wanted
    cutter, shown, rest = StopCutter(stops), "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        shown += "".join(cutter.feed(rest[:size]))
        rest = rest[size:]
        read = text[: len(text) - len(rest)]
        assert wanted.startswith(shown)
        # Nothing is held back for longer than a stop string may need.
        longest = max(map(len, stops), default=1)
        assert len(shown) >= min(len(wanted), len(read) - 2 * longest)
    assert shown + "".join(cutter.feed("", is_last=True)) == wanted


JAPANESE = "これはとてもながいぶんしょうです。"


@pytest.mark.parametrize("load", [load_tokenizer, cache(partial(sentence_pieces, "prepend"))])
@given(data=st.data())
def test_all_pieces_are_the_text(load: Any, data: st.DataObject) -> None:
    tokenizer = load()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=20))

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    spelling = Spelling(decode)
    pieces = [spelling.add(each) for each in ids]
    text = "".join(pieces) + spelling.rest()
    # What is no character at all is written as one mark or as several.
    if "\ufffd" not in decode(ids):
        assert text == decode(ids)
    assert spelling.rest() == ""


class Dictated(LogitsProcessor):
    """Has the model write these tokens."""

    def __init__(self, prompt_tokens: int, ids: list[int]) -> None:
        self._prompt_tokens = prompt_tokens
        self._ids = ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, self._ids[input_ids.shape[1] - self._prompt_tokens]] = 0
        return chosen


@cache
def reader() -> BlendEngine:
    return BlendEngine(tiny_reader(eos_token_id=None), load_tokenizer(), **engine_settings(self_check=False))


PROMPT = BlendPrompt("Hello there")


def dictated(ids: list[int]) -> dict[str, Any]:
    return {"do_sample": False, "logits_processor": [Dictated(len(reader().prompt_ids(PROMPT)), ids)]}


def test_a_stream_of_a_language_without_spaces_comes_character_by_character() -> None:
    ids = reader().tokenizer(JAPANESE, add_special_tokens=False)["input_ids"]
    stream = reader().stream(PROMPT, len(ids), **dictated(ids))
    pieces = list(stream)
    assert "".join(pieces) == stream.result().text == JAPANESE
    assert len(pieces) == len(JAPANESE)


@pytest.mark.parametrize("stop", ["<pad>", ["never", "<pad>"]])
def test_a_special_token_may_be_what_stops_an_answer(stop: Any) -> None:
    tokenizer = reader().tokenizer
    ids = [*tokenizer("The cat sat", add_special_tokens=False)["input_ids"], tokenizer.pad_token_id]
    options = dictated([*ids, *ids])
    result = reader().generate(PROMPT, 2 * len(ids), stop_strings=stop, **options)
    assert (result.token_ids, result.finish_reason, result.text) == (tuple(ids), "stop", "The cat sat")
    assert reader().generate(PROMPT, 2 * len(ids), **options).finish_reason == "length"
