"""Every data set read from a small file in its public format."""

import logging
import pickle
from pathlib import Path

import pytest

from cacheblend_lab.eval.datasets import LONGBENCH_SUBTASKS, load_task
from cacheblend_lab.eval.datasets.samsum import EXAMPLES
from cacheblend_lab.eval.task import EvalTask
from cacheblend_rag.errors import ConfigError, DatasetError
from lab.tests.eval.datasets.files import ctxs, jsonl, listed, longbench, musique, qa, samsum, wiki


def questions(task: EvalTask) -> list[str]:
    return [question.id for context in task.contexts for question in context.questions]


def perfect(task: EvalTask) -> None:
    """The first right answer, and none, judged by every metric."""
    for context in task.contexts:
        (question,) = context.questions
        for metric in task.metrics.values():
            assert metric(task.extract(question.answers[0]), question.answers) == 1.0
            assert metric(task.extract(""), question.answers) == 0.0


def test_questions_of_ones_own(tmp_path: Path) -> None:
    asked = {"question": " Who rules Arn? ", "answers": ["Oda Rime", "Rime"], "id": "arn", "kind": "single"}
    record = {"documents": ["Vell is a port.", "Oda Rime rules Arn."], "questions": [asked, qa()]}
    leval = {"input": "Marn is old.", "instructions": ["Is Marn old?", "Why?"], "outputs": ["Yes", "It is."]}
    task = load_task("qa", jsonl(tmp_path / "own.jsonl", [record, leval]))
    assert [context.texts for context in task.contexts] == [tuple(record["documents"]), ("Marn is old.",)]
    assert questions(task) == ["arn", "1-1", "2-0", "2-1"]
    assert task.contexts[0].questions[0].text == "Who rules Arn?"
    assert [question.kind for question in task.contexts[0].questions] == ["single", "all"]
    assert task.chat and not task.chunked
    metric = next(iter(task.metrics.values()))
    assert [metric(answer, ("Oda Rime", "Rime")) for answer in ("It is RIME.", "It is Oda.")] == [1, 0]
    # What is wanted ends within a record.
    assert questions(load_task("qa", tmp_path / "own.jsonl", limit=3)) == ["arn", "1-1", "2-0"]


def test_questions_about_chunks_of_ones_own(tmp_path: Path) -> None:
    record = {"documents": [["Vell is a port.", "It is old."], ["Oda rules."]], "questions": [qa(chunks=[2, 0])]}
    task = load_task("qa", jsonl(tmp_path / "own.jsonl", [record]))
    [context] = task.contexts
    assert context.texts == ("Vell is a port.", "It is old.", "Oda rules.") and context.documents == (2, 1)
    assert task.chunked and context.questions[0].chunks == (2, 0)
    mixed = [record, {"documents": ["Vell is a port."], "questions": [qa()]}]
    with pytest.raises(DatasetError, match=r"record 2 .*lists of chunks and those before are texts"):
        load_task("qa", jsonl(tmp_path / "mixed.jsonl", mixed))


def test_musique(tmp_path: Path) -> None:
    task = load_task("musique", jsonl(tmp_path / "d.jsonl", [musique(), musique(1, id="4hop3__1", answer_aliases=[])]))
    first, second = task.contexts
    assert first.texts == ("Vell\nVell is a port in Arn.", "Arn\nArn is ruled by Oda Rime.")
    (question,) = first.questions
    assert question.text == "Who rules the land of Vell?"
    assert question.answers == ("Oda Rime", "Rime")
    assert (question.kind, second.questions[0].kind) == ("2hop", "4hop3")
    assert list(task.metrics) == ["f1", "exact_match"]
    assert "Answer within 5 words." in task.tail and "{question}" in task.tail
    assert not task.chunked
    perfect(task)


def test_musique_leaves_out_what_cannot_be_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # The full edition holds each question twice, under one id.
    file = jsonl(tmp_path / "full.jsonl", [musique(answerable=False, answer=""), musique(), musique(1)])
    with caplog.at_level(logging.WARNING):
        task = load_task("musique", file)
    assert questions(task) == ["2hop__0_1", "2hop__1_1"]
    assert f"{file}: 2 questions; records left out: 1 with answerable false" in caplog.text
    with pytest.raises(DatasetError, match=r"holds no question \(left out: 1 with answerable false\)"):
        load_task("musique", jsonl(tmp_path / "none.jsonl", [musique(answerable=False)]))


def test_wikimqa(tmp_path: Path) -> None:
    task = load_task("2wikimqa", listed(tmp_path / "dev.json", [wiki(), wiki(1, context=[["Marn", []]])]))
    assert task.contexts[0].texts == ("Vell\nVell is a port. It was built in 1310.", "Marn\nMarn was built in 1422.")
    assert task.contexts[1].texts == ("Marn",)
    assert task.contexts[0].questions[0].kind == "comparison"
    perfect(task)


@pytest.mark.parametrize("name", ["musique", "2wikimqa"])
def test_ready_passages(tmp_path: Path, name: str) -> None:
    task = load_task(name, listed(tmp_path / "inputs.json", [ctxs(), ctxs()]))
    assert task.contexts[0].texts == ("Vell is a port in Arn.", "Arn\nOda Rime rules Arn.")
    assert questions(task) == [f"{name}-1", f"{name}-2"]
    perfect(task)


def test_samsum_draws_examples_from_the_other_records(tmp_path: Path) -> None:
    records = [samsum(number) for number in range(20)]
    file = listed(tmp_path / "test.json", records)
    task = load_task("samsum", file)
    assert task.chunked
    for number, context in enumerate(task.contexts):
        (question,) = context.questions
        assert question.text == f"Ann: I bring cake {number}.\nBob: Great!"
        assert question.answers == (f"Ann brings cake number {number}.",)
        shown = "\n\n".join(context.texts)
        assert shown.count("Dialogue:\n") == shown.count("Summary: ") == EXAMPLES
        assert question.text not in shown
        assert all(text.startswith("Dialogue:") and len(text) <= 1600 for text in context.texts)
    assert load_task("samsum", file, limit=3).contexts == task.contexts[:3]
    perfect(task)


def test_samsum_as_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listed(tmp_path / "test.json", [samsum()])
    train = jsonl(tmp_path / "train.jsonl", [samsum(1), samsum(2, dialogue=None), samsum(3, dialogue=" ")])
    with caplog.at_level(logging.WARNING):
        task = load_task("samsum", tmp_path)
    assert task.contexts[0].texts == (
        "Dialogue:\nAnn: I bring cake 1.\nBob: Great!\nSummary: Ann brings cake number 1.",
    )
    assert "2 with a blank dialogue (examples)" in caplog.text
    assert load_task("samsum", tmp_path / "test.json", examples=train).contexts == task.contexts


def test_samsum_needs_an_example(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"record 1 \(line 1\): a single dialogue leaves none for an example"):
        load_task("samsum", jsonl(tmp_path / "test.jsonl", [samsum()]))
    empty = jsonl(tmp_path / "train.jsonl", [])
    with pytest.raises(DatasetError, match=r"train\.jsonl holds no dialogue"):
        load_task("samsum", tmp_path / "test.jsonl", examples=empty)
    empty.unlink()
    with pytest.raises(DatasetError, match=r"neither train\.json nor train\.jsonl"):
        load_task("samsum", tmp_path)


@pytest.mark.parametrize("source", ["val.src.cleaned", "val.src"])
def test_multinews_of_two_files(tmp_path: Path, source: str, caplog: pytest.LogCaptureFixture) -> None:
    lines = [
        "First news. NEWLINE_CHAR NEWLINE_CHAR More.\u2028Still. ||||| Second news. |||||",
        "Old. story_separator_special_tag Older.",
        " ||||| ",
        "x " * 3000,
    ]
    (tmp_path / source).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tmp_path / "val.tgt").write_text("– Two.\r\n– Old.\r\n– None.\r\n– Long.", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        task = load_task("multinews", tmp_path / source)
    first, second, last = task.contexts
    assert first.texts == ("First news. \n \n More.\u2028Still.", "Second news.")
    assert second.texts == ("Old.", "Older.")
    assert [len(text) for text in last.texts] == [2047, 2047, 1903]
    assert [context.questions[0].answers for context in task.contexts] == [("– Two.",), ("– Old.",), ("– Long.",)]
    assert questions(task) == ["multinews-1", "multinews-2", "multinews-4"]
    assert "1 with no article" in caplog.text
    assert task.chunked and first.questions[0].text == ""
    perfect(task)


def test_multinews_that_does_not_fit_together(tmp_path: Path) -> None:
    source = tmp_path / "val.src.cleaned"
    source.write_text("One.\nTwo.\n", encoding="utf-8")
    with pytest.raises(DatasetError, match=r"val\.tgt or val\.tgt\.cleaned is missing"):
        load_task("multinews", source)
    target = tmp_path / "val.tgt"
    target.write_text("One.\n", encoding="utf-8")
    with pytest.raises(DatasetError, match=r"2 lines and .*val\.tgt 1;"):
        load_task("multinews", source)
    target.write_text("One.\n \n", encoding="utf-8")
    with pytest.raises(DatasetError, match=r"val\.tgt, record 2 \(line 2\): field 'summary' is empty"):
        load_task("multinews", source)
    with pytest.raises(DatasetError, match=r"neither a \.src file"):
        load_task("multinews", target)


@pytest.mark.parametrize("subtask", LONGBENCH_SUBTASKS)
def test_longbench(tmp_path: Path, subtask: str) -> None:
    file = jsonl(tmp_path / f"{subtask}.jsonl", [longbench(subtask, number) for number in range(3)])
    task = load_task("longbench", file)
    assert task.name == f"longbench/{subtask}"
    assert {question.kind for context in task.contexts for question in context.questions} == {subtask}
    assert len(task.contexts) == 3
    assert "{question}" in task.tail or task.contexts[0].questions[0].text == ""
    assert task.contexts[0].texts and all(text.strip() for text in task.contexts[0].texts)
    assert load_task("longbench", tmp_path, subtask=subtask, limit=1).contexts == task.contexts[:1]
    assert pickle.loads(pickle.dumps(task)).contexts == task.contexts
    perfect(task)


def test_longbench_code_is_kept_to_the_character(tmp_path: Path) -> None:
    context = "".join(f"def f{number}(x):\n    return x + {number}\n\n" for number in range(200))
    task = load_task("longbench", jsonl(tmp_path / "lcc.jsonl", [longbench("lcc", context=context)]))
    texts, question = task.contexts[0].texts, task.contexts[0].questions[0].text
    assert task.separator == ""
    assert "".join(texts) + question == context
    assert all(text.endswith("\n") and len(text) <= 1536 for text in texts)
    assert 500 < len(question) <= 600


def test_longbench_subtasks_are_read_alone(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "mixed.jsonl", [longbench("qasper"), longbench("trec", 1)])
    with pytest.raises(DatasetError, match=r"record 2 \(line 2\): field 'dataset' says 'trec' where 'qasper' is read"):
        load_task("longbench", file)
    with pytest.raises(DatasetError, match="where 'trec' is read"):
        load_task("longbench", file, subtask="trec")
    with pytest.raises(DatasetError, match=r"is a folder; name a subtask"):
        load_task("longbench", tmp_path)
    with pytest.raises(DatasetError, match=r"subtask 'vcsum' is unknown"):
        load_task("longbench", tmp_path, subtask="vcsum")
    classes = longbench("trec", 1, all_classes=["Other location"])
    with pytest.raises(DatasetError, match="differs from that of the records before"):
        load_task("longbench", jsonl(tmp_path / "trec.jsonl", [longbench("trec"), classes]))


def test_options_that_have_no_meaning(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "dev.jsonl", [musique()])
    with pytest.raises(ConfigError, match="'squad' is unknown; choose one of qa, musique, 2wikimqa"):
        load_task("squad", file)
    with pytest.raises(ConfigError, match="limit=0"):
        load_task("musique", file, limit=0)
    with pytest.raises(ConfigError, match="subtask='qasper' cannot be used with musique"):
        load_task("musique", file, subtask="qasper")
    with pytest.raises(ConfigError, match="whole=True cannot be used with musique"):
        load_task("musique", "unread", whole=True)
    with pytest.raises(ConfigError, match="cannot be used with musique"):
        load_task("musique", file, examples=file)


@pytest.mark.parametrize(
    ("subtask", "documents"), [("hotpotqa", 2), ("multi_news", 2), ("qmsum", 1), ("gov_report", 1)]
)
def test_whole_documents_are_all_given_each_by_itself(subtask: str, documents: int, tmp_path: Path) -> None:
    # Longer than a chunk is where documents are cut.
    record = longbench(subtask)
    record["context"] = "\n\n".join(f"Passage {n}:\n" + "Arn is ruled by Oda Rime.\n" * 99 for n in (1, 2)).strip()
    task = load_task("longbench", jsonl(tmp_path / f"{subtask}.jsonl", [record]), whole=True)
    assert (task.name, task.chunked) == (f"longbench/{subtask}, whole documents", True)
    [context] = task.contexts
    assert len(context.texts) == documents
    # Nothing of the record is lost, and nothing is added to it.
    assert "".join("".join(context.texts).split()) == "".join(str(record["context"]).split())
