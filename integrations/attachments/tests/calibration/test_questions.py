"""The file of questions that `calibrate` reads."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_attachments.cli.calibrate import read_questions
from cacheblend_rag.errors import ConfigError

# Surrogates cannot be written; the others end a line of text, or are white space at its ends.
QUESTIONS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), min_size=1).filter(str.strip),
    min_size=1,
    max_size=6,
)


@given(questions=QUESTIONS, bom=st.booleans(), form=st.sampled_from(["string", "question"]), gap=st.booleans())
def test_questions_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, questions: list[str], bom: bool, form: str, gap: bool
) -> None:
    folder = tmp_path_factory.mktemp("questions")
    encoding = "utf-8-sig" if bom else "utf-8"
    wanted = list(dict.fromkeys(question.strip() for question in questions))
    lines = [json.dumps(q if form == "string" else {form: q, "answer": 1}, ensure_ascii=False) for q in questions]
    between = "\n\n" if gap else "\n"
    (folder / "q.jsonl").write_text(between.join(lines), encoding=encoding)
    answer = None if form == "string" else "1"
    assert read_questions(folder / "q.jsonl") == dict.fromkeys(wanted, answer)
    if not questions[0].startswith("\ufeff"):
        (folder / "q.txt").write_text(between.join(questions) + "\n", encoding=encoding)
        assert list(read_questions(folder / "q.txt")) == wanted


@pytest.mark.parametrize("text", [None, " \n\n", '"a"\n{"text": "b"}', "[1", '{"question": 3}', "[" * 100_000, "\xff"])
def test_bad_questions(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "q.jsonl"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="jsonl"):
        read_questions(path)
