"""Questions over documents in the formats of public data sets, and files that are none."""

import json
from pathlib import Path
from typing import Any

import pytest

from cacheblend_lab.sets import f1, holds, read_set, rouge_l
from cacheblend_rag.errors import ConfigError

OWN = {"documents": ["Vell is a port.", "Arn."], "questions": [{"question": "Who?", "answers": ["Oda Rime", "Rime"]}]}
LEVAL = {"input": "Vell is a port.", "instructions": ["Which?", "Where?"], "outputs": ["Vell", "Arn"], "source": "x"}
CONTEXTS = [{"title": "", "text": "Vell."}, {"title": "Arn", "text": "Rime."}]
PASSAGES = {"ctxs": CONTEXTS, "question": "Who?", "answers": ["Rime"]}
MUSIQUE = {
    "paragraphs": [{"title": "Vell", "paragraph_text": "Vell is a port."}, {"title": "Arn", "paragraph_text": "Arn."}],
    "question": "Who?",
    "answer": "Oda Rime",
    "answer_aliases": ["Rime"],
    "answerable": True,
}
HOTPOT = {"_id": "w", "context": [["Vell", ["A port.", " Old."]], ["Marn", []]], "question": "Which?", "answer": "Vell"}
DIALOGUE = {"id": "1", "dialogue": "A: hi\r\nB: hi", "summary": "They greet."}
NEWS = {"document": "One.NEWLINE_CHAR Two. ||||| Three.", "summary": "All."}
LONGBENCH = {
    "dataset": "qasper_e",
    "context": "A paper.",
    "input": "What?",
    "answers": ["A paper"],
    "all_classes": None,
}


def written(path: Path, records: list[dict[str, Any]], listed: bool = False) -> Path:
    lines = [json.dumps(each, indent=None) for each in records]
    path.write_text(f"[{','.join(lines)}]" if listed else "\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("record", "documents", "questions"),
    [
        (OWN, ["Vell is a port.", "Arn."], [("Who?", ("Oda Rime", "Rime"), (0, 1))]),
        (LEVAL, ["Vell is a port."], [("Which?", ("Vell",), (0,)), ("Where?", ("Arn",), (0,))]),
        (PASSAGES, ["Vell.", "Arn\nRime."], [("Who?", ("Rime",), (0, 1))]),
        (MUSIQUE, ["Vell\nVell is a port.", "Arn\nArn."], [("Who?", ("Oda Rime", "Rime"), (0, 1))]),
        (HOTPOT, ["Vell\nA port. Old.", "Marn"], [("Which?", ("Vell",), (0, 1))]),
        (NEWS, ["One.\n Two.", "Three."], [("", ("All.",), (0, 1))]),
        (LONGBENCH, ["A paper."], [("What?", ("A paper",), (0,))]),
    ],
)
def test_a_file_is_read_by_its_fields(
    tmp_path: Path, record: dict[str, Any], documents: list[str], questions: list[Any], listed: bool
) -> None:
    found = read_set(written(tmp_path / "set.json", [record, record], listed))
    assert found.documents == [*documents, *documents]
    assert [(each.text, each.answers, each.documents) for each in found.questions[: len(questions)]] == questions
    # Those of the second record are asked about its own documents.
    last = found.questions[-1]
    assert last.documents == tuple(range(len(documents), 2 * len(documents)))
    assert found.score(last.answers[-1], last.answers) == 1
    assert found.head.strip() and "{}" in found.tail


def test_dialogues_are_asked_about_behind_those_before_them(tmp_path: Path) -> None:
    found = read_set(written(tmp_path / "set.json", [DIALOGUE] * 20))
    assert len(found.documents) == 20 and len(found.questions) == 19
    assert [found.questions[number].documents for number in (0, 18)] == [(0,), tuple(range(3, 19))]
    assert found.documents[0].endswith("\nSummary: They greet.")


def test_what_has_no_answer_is_left_out(tmp_path: Path) -> None:
    found = read_set(written(tmp_path / "set.json", [MUSIQUE | {"answerable": False}, MUSIQUE]))
    assert len(found.documents) == 2 and len(found.questions) == 1


@pytest.mark.parametrize(
    ("records", "place"),
    [
        ([OWN, {"a": 1}], "record 2"),
        ([OWN, LEVAL], "record 2"),
        ([MUSIQUE | {"answer": " "}], "record 1"),
        ([OWN | {"questions": [{"question": "Who?", "answers": []}]}], "questions.0.answers"),
        ([LEVAL | {"outputs": ["Vell"]}], "record 1"),
        ([LONGBENCH | {"dataset": "lcc"}], "'lcc'"),
        ([MUSIQUE | {"answerable": False}], "no question"),
        ([], "no question"),
        ([1], "records"),
        (b"\xff", "cannot be read"),
        (b'{"documents": [', "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_flaw_is_said_with_its_place(tmp_path: Path, records: Any, place: str) -> None:
    path = tmp_path / "set.json"
    if isinstance(records, bytes):
        path.write_bytes(records)
    elif records is not None:
        written(path, records)
    with pytest.raises(ConfigError) as error:
        read_set(path)
    assert str(path) in str(error.value) and place in str(error.value)


def test_scores_are_those_of_the_nearest_right_answer() -> None:
    assert f1("the Oda Rime", ("Rime", "Oda Rime!")) == 1
    assert f1("Oda Rime of Arn", ("Oda Rime",)) == pytest.approx(2 / 3)
    assert f1("", ("Rime",)) == holds("", ("Rime",)) == rouge_l("", ("Rime",)) == 0
    assert (holds("It is Oda Rime.", ("Vell", "Rime")), holds("It is Rimes.", ("Rime",))) == (1, 0)
    # Stemmed, the longest common subsequence has three of four and three of three words.
    assert rouge_l("the ports were old", ("ports were old", "none")) == pytest.approx(6 / 7)
