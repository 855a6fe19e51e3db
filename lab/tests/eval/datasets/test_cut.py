"""Cutting and packing lose nothing and keep to the length."""

import re

from hypothesis import given
from hypothesis import strategies as st

from cacheblend_lab.eval.datasets.subtasks import SUBTASKS
from cacheblend_lab.eval.datasets.texts import code_line, cut, first_line, pack, split_before

texts = st.text(alphabet="ab .\n", max_size=200)


@given(text=texts, max_chars=st.integers(1, 40))
def test_cutting(text: str, max_chars: int) -> None:
    pieces = cut(text, max_chars)
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= max_chars for piece in pieces)


@given(pieces=st.lists(texts, max_size=8), max_chars=st.integers(1, 60))
def test_packing(pieces: list[str], max_chars: int) -> None:
    chunks = pack(pieces, max_chars)
    assert "".join(chunks) == "".join(pieces)
    assert all(len(chunk) <= max_chars for chunk in chunks)


@given(text=texts)
def test_splitting(text: str) -> None:
    pieces = split_before(re.compile(r"^a", re.MULTILINE), text)
    assert "".join(pieces) == text
    assert all(piece.startswith("a") for piece in pieces[1:])


@given(code=st.text(alphabet="ab \n", max_size=5000).filter(str.strip))
def test_code_is_cut_before_its_last_lines(code: str) -> None:
    texts, question = SUBTASKS["lcc"].arrange(code, "")
    assert len(question) <= 600
    assert len(question) <= len(code) / 4
    if code[0].strip():
        # What is blank from the first character on is left out.
        assert texts
    assert "".join("".join(texts).split()) + "".join(question.split()) == "".join(code.split())


def test_lines_come_before_sentences_and_words() -> None:
    assert cut("one two. three\nfour five six", 18) == ["one two. three\n", "four five six"]
    assert cut("one two three. four five six", 18) == ["one two three. ", "four five six"]
    assert cut("one two three four", 12) == ["one two ", "three four"]
    assert cut("abcdefgh", 3) == ["abc", "def", "gh"]
    assert pack(["aa", "bb", "cc", "dddddd", "e"], 4) == ["aabb", "cc", "dddd", "dde"]


def test_what_is_judged_of_an_answer() -> None:
    assert first_line("\n\n Oslo \nQuestion: more") == "Oslo"
    assert first_line(" \n") == ""
    assert code_line("```python\n# a comment\n\n    return 1\nprint(2)") == "    return 1"
    assert code_line("// nothing") == ""
