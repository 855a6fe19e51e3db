"""Files and records with something wrong: always a DatasetError that says where, never another error and never silence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_lab.eval.datasets import load_task
from cacheblend_lab.eval.datasets.records import read_records
from cacheblend_rag.errors import DatasetError
from lab.tests.eval.datasets.files import Fields, ctxs, jsonl, listed, longbench, musique, news, samsum, wiki


def two(subtask: str) -> list[Fields]:
    return [longbench(subtask), longbench(subtask, 1)]


# For each data set: two good records, and the fields that it cannot do without.
GOOD: dict[str, tuple[str, list[Fields], tuple[str, ...]]] = {
    "musique": ("musique", [musique(), musique(1)], ("id", "paragraphs", "question", "answer")),
    "2wikimqa": ("2wikimqa", [wiki(), wiki(1)], ("_id", "context", "question", "answer")),
    "ctxs": ("musique", [ctxs(), ctxs()], ("ctxs", "question", "answers")),
    "samsum": ("samsum", [samsum(), samsum(1)], ("id", "dialogue", "summary")),
    "multinews": ("multinews", [news(), news()], ("document", "summary")),
    "longbench": ("longbench", two("qasper"), ("_id", "context", "input", "answers", "dataset")),
    "retrieval": ("longbench", two("passage_retrieval_en"), ("answers", "input")),
    "code": ("longbench", two("lcc"), ("answers", "context", "input")),
    "trec": ("longbench", two("trec"), ("answers", "all_classes")),
}
NEEDED = [(case, field) for case, (_, _, fields) in GOOD.items() for field in fields]


@pytest.mark.parametrize(("case", "field"), NEEDED)
@pytest.mark.parametrize("write", [jsonl, listed])
def test_a_missing_field(tmp_path: Path, case: str, field: str, write: Callable[..., Path]) -> None:
    name, (first, second), _ = GOOD[case]
    broken = {key: value for key, value in second.items() if key != field}
    file = write(tmp_path / "data.json", [first, broken])
    # Without "ctxs" a record is taken for MuSiQue's own.
    wanted = "id" if field == "ctxs" else field
    line = 2 if write is jsonl else file.read_text(encoding="utf-8").split("\n").index(" },") + 2
    with pytest.raises(DatasetError, match=rf"data\.json, record 2 \(line {line}\): field '{wanted}' is missing"):
        load_task(name, file)


@pytest.mark.parametrize(("case", "field"), NEEDED)
@pytest.mark.parametrize("value", [[], {}, [[]], [None], [1.5], True])
def test_a_field_of_another_shape(tmp_path: Path, case: str, field: str, value: object) -> None:
    name, (first, second), _ = GOOD[case]
    with pytest.raises(DatasetError, match=rf"record 2 \(line 2\): field '{field}"):
        load_task(name, jsonl(tmp_path / "data.jsonl", [first, second | {field: value}]))


@pytest.mark.parametrize(
    ("name", "record", "problem"),
    [
        ("musique", musique(answer=""), "field 'answer' is empty"),
        ("musique", musique(answer_aliases=[""]), r"field 'answer_aliases\[0\]' is empty"),
        ("musique", musique(answerable="no"), "field 'answerable' must be true or false, and is a text: 'no'"),
        ("musique", musique(paragraphs=[{"title": "Vell"}]), r"field 'paragraphs\[0\]\.paragraph_text' is missing"),
        ("musique", musique(paragraphs=["Vell"]), r"field 'paragraphs\[0\]' must be an object, and is a text: 'Vell'"),
        ("musique", ctxs(answers=[]), "field 'answers' is an empty list"),
        ("musique", ctxs(answers=["Rime", " "]), r"field 'answers\[1\]' is empty"),
        ("musique", ctxs(answers="Rime"), "field 'answers' must be a list, and is a text: 'Rime'"),
        ("musique", ctxs(ctxs=[{"title": 3, "text": "a"}]), r"field 'ctxs\[0\]\.title' must be a text"),
        ("musique", musique(question="\ud800?"), "field 'question' holds half of a surrogate pair"),
        ("2wikimqa", wiki(context=[["Vell"]]), r"field 'context\[0\]' must be \[title, \[sentences\]\]"),
        ("2wikimqa", wiki(context=[["Vell", "It is."]]), r"field 'context\[0\]\.sentences' must be a list"),
        ("2wikimqa", wiki(context=[["", [""]]]), r"field 'context\[0\]' has neither a title nor a sentence"),
        ("multinews", news(summary=" "), "field 'summary' is empty"),
        ("longbench", longbench("qasper", answers=[]), "field 'answers' is an empty list"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, name: str, record: Fields, problem: str) -> None:
    with pytest.raises(DatasetError, match=rf"record 1 \(line 1\): {problem}"):
        load_task(name, jsonl(tmp_path / "data.jsonl", [record]))


def test_an_id_stands_once(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"record 3 \(line 3\): the id '2hop__0_1' is that of record 1 too"):
        load_task("musique", jsonl(tmp_path / "data.jsonl", [musique(), musique(1), musique()]))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "holds no question"),
        (b"\n \n", "holds no question"),
        (b"[]", "holds no question"),
        (b"question,answer\n", r"line 1: not JSON \(Expecting value"),
        (b'{"id": "a"', r"line 1: not JSON \(Expecting ',' delimiter"),
        (b'\n\n{"id": }', "line 3: not JSON"),
        (b'[{"id": "a"}', r"record 1"),
        (b"[1]", r"record 1 \(line 1\): must be an object with named fields: 1"),
        (b"null\n", r"record 1 \(line 1\): must be an object"),
        (b"{} {}", "more follows after the record's end"),
        (b"[" * 100_000, "not JSON"),
        (b'{"id": ' + b"9" * 5000 + b"}", "not JSON"),
        ("{}".encode("utf-16"), r"is not UTF-8 \(line 1, byte 0\)"),
        (b'{}\n{"id": "\xe9"}', r"is not UTF-8 \(line 2, byte 11\)"),
    ],
)
def test_files_that_are_no_data_set(tmp_path: Path, data: bytes, problem: str) -> None:
    file = tmp_path / "data.json"
    file.write_bytes(data)
    with pytest.raises(DatasetError, match=problem) as error:
        load_task("musique", file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[{}", "line 1: .*a comma or the end"),
        ("[{}\n{}]", "line 2: .*a comma or the end"),
        ("[{},\n\n x]", r"line 3: not JSON \(Expecting value"),
        ("[{},]", "Expecting value"),
        ("[{}]\n{}", "line 2: .*more follows"),
    ],
)
def test_lists_that_are_cut_off(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "data.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(DatasetError, match=problem):
        list(read_records(file))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path, Path("a\0b")):
        with pytest.raises(DatasetError, match="cannot be read"):
            load_task("musique", path)


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "data.jsonl", [musique()])
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert len(load_task("musique", file).contexts) == 1


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text('\n[\n {"a": "\u2028"},\n\n {"a":\n 1}, {"a": 2}]\n', encoding="utf-8")
    assert [(each.number, each.line) for each in read_records(file)] == [(1, 3), (2, 5), (3, 6)]
    file.write_text('\n{"a": "\u2028"}\n\n{"a": 1}', encoding="utf-8")
    assert [(each.number, each.line) for each in read_records(file)] == [(1, 2), (2, 4)]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def places(draw: st.DrawFn, value: object) -> tuple[str | int, ...]:
    """Where something in a record stands, at any depth."""
    path: list[str | int] = []
    while isinstance(value, dict | list) and value and (not path or draw(st.booleans())):
        key: Any = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        path.append(key)
        value = value[key]
    return tuple(path)


def outcome(name: str, file: Path, *, names: str = "") -> None:
    """Load; whatever comes of it is a task of sound questions, or the one error, which names the file."""
    problem = None
    try:
        task = load_task(name, file)
    except DatasetError as error:
        problem = str(error)
    if problem is not None:
        assert (names or str(file)) in problem
        return
    for context in task.contexts:
        assert context.texts and all(isinstance(text, str) and text.strip() for text in context.texts)
        (question,) = context.questions
        assert question.answers and all(answer.strip() for answer in question.answers)
        for text in (*context.texts, *question.answers, question.text, question.id, question.kind):
            text.encode()
        for metric in task.metrics.values():
            assert 0.0 <= metric(task.extract(question.text), question.answers) <= 1.0


@pytest.mark.parametrize("case", GOOD)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_record(tmp_path: Path, case: str, data: st.DataObject) -> None:
    name, (first, second), _ = GOOD[case]
    copy = json.loads(json.dumps(second))
    path = data.draw(places(copy))
    inner: Any = copy
    for key in path[:-1]:
        inner = inner[key]
    if data.draw(st.booleans()):
        del inner[path[-1]]
    else:
        inner[path[-1]] = data.draw(json_values)
    write = data.draw(st.sampled_from([jsonl, listed]))
    outcome(name, write(tmp_path / "data.json", [first, copy]))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=st.binary(max_size=60), target=st.binary(max_size=60))
def test_any_two_files_of_multinews(tmp_path: Path, source: bytes, target: bytes) -> None:
    (tmp_path / "val.src").write_bytes(source)
    (tmp_path / "val.tgt").write_bytes(target)
    outcome("multinews", tmp_path / "val.src", names=str(tmp_path / "val"))
