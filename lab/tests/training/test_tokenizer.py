"""The tokenizer and the prompt formats."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cacheblend_lab.reference.prompt import ASSISTANT, BOS, FORMATS, USER, chat
from cacheblend_lab.training.tokenizer import build_tokenizer, save_tokenizer

TOKENIZER = build_tokenizer()
LINES = st.lists(
    st.text(st.characters(exclude_characters="\n", exclude_categories=("Cs",)), max_size=30), min_size=1, max_size=5
)


def ids(text: str) -> list[int]:
    encoded: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return encoded


@settings(max_examples=200)
@given(LINES)
def test_pieces_cut_at_line_breaks_equal_the_whole(lines: list[str]) -> None:
    whole = ids("\n".join(lines))
    before = [token for number, line in enumerate(lines) for token in ids(line if number == 0 else "\n" + line)]
    after = [token for number, line in enumerate(lines) for token in ids(line + "\n" * (number + 1 < len(lines)))]
    assert whole == before == after


@settings(max_examples=200)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert TOKENIZER.decode(ids(text)) == text


def test_a_line_break_is_always_a_token_of_its_own() -> None:
    assert len(ids("\n\n\n")) == 3
    assert ids("a\n\nb") == [*ids("a"), *ids("\n") * 2, *ids("b")]


def test_the_vocabulary_stays_small_and_has_its_special_tokens() -> None:
    assert len(TOKENIZER) <= 2048
    special = [TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id]
    assert None not in special
    assert len(set(special)) == 3


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_has_one_bos_and_safe_borders(name: str) -> None:
    form = FORMATS[name]
    chunks, question = ["Marta Harsen lives in Ashford.", "She keeps a grey goat."], "Where does Marta Harsen live?"
    rendered = form.render(chunks, question)
    pieces = [form.prefix(), chunks[0], form.separator, chunks[1], form.suffix(question)]
    assert ids(rendered) == [token for piece in pieces for token in ids(piece)]
    assert ids(rendered).count(TOKENIZER.bos_token_id) == 1
    assert ids(rendered)[0] == TOKENIZER.bos_token_id


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_chat_formats_are_what_the_chat_template_renders(system: str | None) -> None:
    inner = FORMATS["llama_index"]
    messages = [{"role": "user", "content": inner.render(["A.", "B."], "C?").removeprefix(BOS)}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    rendered = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == chat(inner, system).render(["A.", "B."], "C?")
    assert rendered.count(BOS) == 1


def test_a_finished_turn_ends_with_eos() -> None:
    messages = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]
    assert TOKENIZER.apply_chat_template(messages, tokenize=False) == f"{BOS}{USER}\nA?\n{ASSISTANT}\nB.</s>\n"


def test_a_saved_tokenizer_is_loaded_by_transformers(tmp_path: Path) -> None:
    save_tokenizer(TOKENIZER, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert loaded.chat_template == TOKENIZER.chat_template
    assert loaded("Marta\n keeps", add_special_tokens=False)["input_ids"] == ids("Marta\n keeps")
