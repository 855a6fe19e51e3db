"""Files and records with something wrong: always a DatasetError that says where, never another error and never silence."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_lab.eval.datasets import load_task
from cacheblend_lab.eval.datasets.records import read_records
from cacheblend_rag.errors import DatasetError
from lab.tests.eval.datasets.files import Fields, ctxs, jsonl, listed, longbench, musique, news, qa, samsum, wiki

# Two good records of each data set.
GOOD: dict[str, tuple[str, list[Fields]]] = {
    "musique": ("musique", [musique(), musique(1)]),
    "2wikimqa": ("2wikimqa", [wiki(), wiki(1)]),
    "ctxs": ("musique", [ctxs(), ctxs()]),
    "samsum": ("samsum", [samsum(), samsum(1)]),
    "multinews": ("multinews", [news(), news()]),
    **{
        each: ("longbench", [longbench(each), longbench(each, 1)])
        for each in ("qasper", "passage_retrieval_en", "lcc", "trec")
    },
}


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
        ("longbench", longbench("dureader"), ".*'dureader' .*, an unknown subtask; known are .*qasper"),
        ("longbench", longbench("passage_count", answers=["two"]), r".*'answers\[0\]' must be a number, and is 'two'"),
        ("longbench", longbench("passage_retrieval_en", answers=["2"]), ".* must have the form 'Paragraph 7'"),
        ("longbench", longbench("trec", answers=["Colour"]), ".*'Colour', which is none of 'all_classes'"),
        ("qa", {"documents": ["a"], "questions": [{"question": "b"}]}, r"field 'questions\[0\]\.answers' is missing"),
        ("qa", {"documents": [["a"], "b"], "questions": []}, "field 'documents.1' must be a list"),
        ("qa", {"documents": [["a"]], "questions": [qa(chunks=[1])]}, ".*chunk 1 of 1"),
        ("qa", {"documents": [["a"]], "questions": [qa(chunks=[-1])]}, ".*numbers from 0"),
        ("qa", {"input": "a", "instructions": ["b"], "outputs": ["c", "d"]}, ".*1 instructions and 2 outputs"),
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
    ("text", "problem"), [("[{}\n{}]", "line 2: .*a comma or the end"), ("[{}]\n{}", "line 2: .*more follows")]
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


def outcome(name: str, file: Path) -> None:
    """Load; whatever comes of it is a task of sound questions, or the one error, which names the file."""
    problem = None
    try:
        task = load_task(name, file)
    except DatasetError as error:
        problem = str(error)
    if problem is not None:
        assert str(file) in problem
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
    name, (first, second) = GOOD[case]
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
