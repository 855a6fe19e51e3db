"""Journals: what is written is read again, and what is damaged is never taken for an answer."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_lab.eval.journal import Answer, Asked, Journal, parse_asked
from cacheblend_rag.errors import ConfigError

HEADER = {"task": "t", "model": "m", "methods": {"full": {"way": "full"}}}
ASKED = [
    Asked("q1", {"full": Answer("Oslo\u2028 \r\n", 1.0, None, 0.25, 3), "hkvd @0.1": None}),
    Asked("q2", skipped="too long"),
    Asked("q\n3", {"full": Answer("", None, 0.5, 0.0, 0)}),
]


def write(path: Path) -> bytes:
    with Journal(path, HEADER) as journal:
        for each in ASKED:
            journal.append(each)
    return path.read_bytes()


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    held = write(path)
    with Journal(path, HEADER) as journal:
        assert list(journal.asked.values()) == ASKED
        assert journal.damaged == 0
    assert path.read_bytes() == held
    assert [json.loads(line)["question"] for line in held.splitlines()[1:]] == ["q1", "q2", "q\n3"]


def test_a_run_ends_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    held = write(path)
    for length in range(len(held)):
        path.write_bytes(held[:length])
        with Journal(path, HEADER) as journal:
            known = list(journal.asked.values())
            assert known == ASKED[: len(known)]
            for each in ASKED[len(known) :]:
                journal.append(each)
        assert path.read_bytes() == held


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_is_never_an_answer(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "answers.jsonl"
    path.unlink(missing_ok=True)
    held = write(path)
    head = held.index(b"\n") + 1
    start = data.draw(st.integers(head, len(held)))
    stop = data.draw(st.integers(start, len(held)))
    path.write_bytes(held[:start] + data.draw(st.binary(max_size=40)) + held[stop:])
    with Journal(path, HEADER) as journal:
        for question, asked in journal.asked.items():
            assert asked.question == question
            assert asked.skipped is not None or asked.answers
        known = journal.asked
    with Journal(path, HEADER) as journal:
        assert (journal.asked, journal.damaged) == (known, 0)


@given(st.binary(max_size=200))
def test_any_bytes_can_be_a_line(line: bytes) -> None:
    assert parse_asked(line) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", None),
        ("ttft_s", "1"),
        ("ttft_s", -1.0),
        ("ttft_s", float("nan")),
        ("output_tokens", 1.5),
        ("charged_ratio", True),
    ],
)
def test_an_answer_of_another_form_is_damage(name: str, value: object) -> None:
    answer = asdict(Answer("a", 1.0, None, 0.1, 1))
    line = {"question": "q", "answers": {"full": answer}, "skipped": None}
    assert parse_asked(json.dumps(line).encode()) is not None
    answer[name] = value  # type: ignore[assignment]
    assert parse_asked(json.dumps(line).encode()) is None


def test_another_evaluation_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path)
    other = {"task": "t", "model": "n", "methods": {"full": {"way": "full"}, "reuse": {}}}
    with pytest.raises(ConfigError, match=r".*methods\.reuse is null there and \{\} here"):
        Journal(path, other)
    with Journal(path, other, fresh=True) as journal:
        assert journal.asked == {}
    path.write_text("dear diary\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a journal of an evaluation"):
        Journal(path, HEADER)
    path.write_text("dear diary", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a journal of an evaluation"):
        Journal(path, HEADER)
    with pytest.raises(ConfigError, match="cannot be used"):
        Journal(tmp_path, HEADER)


def test_a_question_of_another_evaluation_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write(path)
    with Journal(path, HEADER, expected=lambda asked: asked.question != "q2") as journal:
        assert (list(journal.asked), journal.damaged) == (["q1", "q\n3"], 1)
